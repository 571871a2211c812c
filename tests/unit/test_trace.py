"""The trace of slices: the events it writes, which account for the time of a whole process."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner import trace
from runner.errors import UsageError
from runner.trace import Trace


def events(path: Path) -> list[dict[str, object]]:
    """Returns the events as viewers read them: the missing end is added."""
    found = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert isinstance(found, list)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [1_000_000]
    monkeypatch.setattr(trace, "perf_counter_ns", lambda: now[0])
    return now


def test_parts_follow_each_other_in_a_slice_that_holds_them(tmp_path: Path, clock: list[int]) -> None:
    file = tmp_path / "trace.json"
    one = Trace()
    one.start(file)
    one.begin()
    clock[0] += 3_000
    one.lap("schedule")
    one.name("decode", rows=2)
    clock[0] += 5_000
    one.lap("forward")
    one.end()
    one.flush()
    step = {"ph": "X", "pid": 1, "tid": 1}
    assert events(file) == [
        {"name": "schedule", "ts": 1000.0, "dur": 3.0, **step},
        {"name": "forward", "ts": 1003.0, "dur": 5.0, **step},
        {"name": "decode", "ts": 1000.0, "dur": 8.0, "args": {"rows": 2}, **step},
    ]


def write_slice(trace: Trace) -> None:
    trace.begin()
    trace.lap("schedule")
    trace.name("decode")
    trace.end()
    trace.flush()


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """Limits the files of this process, as a full disk does: writes what fits, then raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room_bytes", [0, 1, 2, 250, 600])
def test_on_a_full_disk_tracing_stops_once_and_leaves_whole_events(
    room_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "trace.json"
    one = Trace()
    with room_for(room_bytes):
        one.start(file)
        for _ in range(9):
            write_slice(one)
    write_slice(one)
    assert [record.message for record in caplog.records] == ["tracing stopped"]
    assert caplog.records[0].__dict__["attributes"] == {"file": str(file), "why": "file too large"}
    assert not one._events
    text = file.read_text()
    assert len(text) <= room_bytes
    if room_bytes < 3:
        assert text == ("[\n" if room_bytes == 2 else "")
        return
    names = [event["name"] for event in events(file)]
    assert names == (["schedule", "decode"] * 9)[: len(names)]
    longest = max(len(line) for line in text.splitlines(keepends=True))
    assert room_bytes - len(text) < longest + 10, "every event that has room stays"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_file_that_could_block_the_engine_is_refused(kind: str, tmp_path: Path) -> None:
    """It would wait on a pipe without a reader, or on a device such as a terminal."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(UsageError, match="not a regular file; name a file that you may write"):
            Trace().start(path if kind == "pipe" else Path(os.devnull))
    finally:
        os.close(reader)
