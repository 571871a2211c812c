"""The trace of slices: what it writes, and that it says where the time of a whole process goes."""

import json
from pathlib import Path

import pytest

from runner.engine import trace
from runner.engine.trace import Trace
from runner.errors import UsageError


def events(path: Path) -> list[dict[str, object]]:
    """As the viewers read them, the end that is missing added."""
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


def test_a_slice_without_a_name_leaves_nothing(tmp_path: Path, clock: list[int]) -> None:
    file = tmp_path / "trace.json"
    one = Trace()
    one.start(file)
    for name in ("decode", "", "decode"):
        one.begin()
        clock[0] += 1_000
        one.lap("schedule")
        if name:
            one.name(name)
        clock[0] += 1_000
        one.end()
    one.flush()
    assert [event["name"] for event in events(file)] == ["schedule", "decode"] * 2


def test_what_is_full_is_written_though_the_engine_never_rests(
    tmp_path: Path, clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_FLUSH_EVENTS", 4)
    file = tmp_path / "trace.json"
    one = Trace()
    one.start(file)
    for _ in range(3):
        one.begin()
        one.lap("schedule")
        one.name("decode")
        one.end()
    assert [event["name"] for event in events(file)] == ["schedule", "decode"] * 2


def test_one_that_was_not_started_does_nothing() -> None:
    one = Trace()
    one.begin()
    one.name("decode")
    one.lap("forward")
    one.end()
    one.flush()
    assert not one._events


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--trace .*missing/trace\.json: no such file or directory"):
        Trace().start(tmp_path / "missing" / "trace.json")
