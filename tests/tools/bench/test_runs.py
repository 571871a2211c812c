"""A miniature run of each benchmark: what it says it measures is there. And how one ends that a signal ends."""

import json
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, cast

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench import decode, options, parallel, start, ttft
from scripts.tools.bench.llamas import Prompts, Size
from scripts.tools.bench.servers import (
    BARE,
    OURS,
    SIZES,
    Server,
    other_runner,
    this_runner,
)
from scripts.tools.host.lib import LoadError
from tests import ROOT

Found = Mapping[str, Any]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Found]:
    """Runs a benchmark of tiny models and prompts, without other servers. Returns its JSON."""

    def ours_alone(arguments: Namespace, _: object) -> list[Server]:
        return [this_runner(OURS, 1, blas=arguments.blas, blas_threads=arguments.blas_threads)]

    tiny, folder = Size(64, 1), tmp_path / "made"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    for module in (start, decode, ttft, parallel):
        monkeypatch.setattr(module, "servers", ours_alone)
    for module, name, value in (
        (decode, "TOKENS", {"1M": 20}),
        (ttft, "COLD_TOKENS", 60),
        (ttft, "PREFIX_TOKENS", 50),
        (ttft, "OWN_TOKENS", 20),
        (ttft, "APPENDED_TOKENS", 8),
        (parallel, "SIZE", tiny),
        (parallel, "STREAMS", (1, 2)),
        (parallel, "STREAM_TOKENS", 6),
        (parallel, "LENGTHS", (100,)),
        (parallel, "PREFIX_TOKENS", 60),
        (parallel, "PATIENCE_S", 0.5),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setitem(SIZES, "1M", tiny)

    def run(*words: str) -> Found:
        file = tmp_path / "found.json"
        assert bench.main([*words, f"--json={file}"]) in options.MEASURED
        assert [*folder.iterdir()] == []
        return cast("Found", json.loads(file.read_text()))

    return run


def test_start(measured: Callable[..., Found]) -> None:
    found = measured("start", "--size=1M", "--turns=1")
    (turn,) = found["started"]["1M"][OURS]
    assert 0 < turn["ready_s"] < turn["token_s"]


def test_decode(measured: Callable[..., Found]) -> None:
    found = measured("decode", "--size=1M", "--turns=1")
    model = found["models"]["1M"]
    assert {OURS, BARE} <= {*model["tokens_per_s"]}
    assert all(len(speeds) == 1 and speeds[0] > 0 for speeds in model["tokens_per_s"].values())
    assert model["of_bare"][BARE] == 1.0


def test_ttft(measured: Callable[..., Found]) -> None:
    found = measured("ttft", "--size=1M", "--turns=1")["ms"]
    assert {*found} == {OURS, BARE}
    assert all(took > 0 for (turn,) in found.values() for took in turn["ms"].values())
    # Everything but what is new, and the last token of the answer, which was drawn but not seen, comes from the cache.
    assert found[OURS][0]["computed"] == [60, 1, 9, 9, 9, 9, 9]


def test_parallel(measured: Callable[..., Found]) -> None:
    found = measured("parallel", "--turns=1")["contenders"]
    speeds = {"1 streams", "2 streams"}
    assert {name: {*turn} for name, (turn,) in found.items()} == {
        OURS: speeds | {"gap 100", "newcomer 100", "drop 100", parallel.SHARED},
        BARE: speeds,
    }


# --- ends


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_a_benchmark_that_a_signal_ends_says_so_in_one_line(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.tools.bench", "decode", "--size=1M", "--turns=99999", "--busy"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN),  # as of what a shell starts in the background
    )
    try:
        wait_until(lambda: any(tmp_path.rglob("model.safetensors")) and len(descendants(process.pid)) > 1)
        sleep(1)  # most often it asks its servers by now; it never ends by itself
        started = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    progress = [line for line in told.splitlines() if line.endswith("...")]
    *others, last = [line for line in told.splitlines() if line not in progress and "left out" not in line]
    assert others == []
    assert re.fullmatch("scripts/bench: ended by SIGTERM, without a report", last)
    wait_until(lambda: not any(map(lives, started)))
    assert [*tmp_path.iterdir()] == []


def descendants(pid: int) -> list[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [each for child in children for each in (child, *descendants(child))]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(met: Callable[[], bool]) -> None:
    started = monotonic()
    while not met():
        assert monotonic() < started + 120
        sleep(0.05)


def test_a_contender_that_does_not_start_is_named_by_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    peer = "--peer=other=sh -c 'echo Error: no such luck >&2; exit 3'"
    with pytest.raises(SystemExit, match="2"):
        bench.main(["ttft", peer])
    assert "other did not start: mlx runner failed: Error: no such luck" in capsys.readouterr().err


def test_one_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start, "PATIENCE_S", 0.05)
    with pytest.raises(LoadError):
        start.start(other_runner("deaf", ["sh", "-c", "exec sleep 60"], 1), tmp_path, Prompts(1))
