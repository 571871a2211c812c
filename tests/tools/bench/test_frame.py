"""The parts that all benchmarks share: rounds, tables and targets, the busy machine, `all`, and the command line."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench import options as exits
from scripts.tools.bench.machine import BusyError
from scripts.tools.bench.report import Target, interleave
from tests import ROOT

# --- turns


def test_who_begins_changes_and_the_warm_turns_do_not_count() -> None:
    order: list[str] = []

    def contender(name: str) -> Callable[[], int]:
        def measure() -> int:
            order.append(name)
            return len(order)

        return measure

    found = interleave({name: contender(name) for name in "abc"}, 2)
    assert "".join(order) == "cab" + "abc" + "bca"
    assert found == {"a": [4, 9], "b": [5, 7], "c": [6, 8]}


# --- the busy machine


def test_a_busy_machine_gets_no_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def busy() -> None:
        raise BusyError("the machine is busy: others use 1.00 of its 2 cores")

    monkeypatch.setattr(bench, "check_quiet", busy)
    assert bench.main(["decode"]) == exits.BUSY
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].endswith("wait until they are done, or measure all the same: --busy")
    assert "targets" not in shown.out


# --- the command


class Module:
    """A benchmark that has measured already; it is its own report."""

    def __init__(self, *, met: bool) -> None:
        self.targets = [Target("speed", 1.0 if met else 3.0, 2.0)]

    def add_arguments(self, parser: object) -> None: ...

    def run(self, arguments: object, say: object) -> "Module":
        return self

    def table(self) -> str:
        return "the table"

    figures: Mapping[str, object] = {"figure": 7}


@pytest.mark.parametrize("met", [True, False])
def test_the_status_says_whether_all_targets_are_met(
    met: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "_module", lambda name: Module(met=met))
    file = tmp_path / "found.json"
    assert bench.main(["decode", f"--json={file}"]) == (exits.MET if met else exits.MISSED)
    shown = capsys.readouterr().out
    assert "the table" in shown
    assert ("MISSED" in shown) != met
    found = json.loads(file.read_text())
    assert (found["benchmark"], found["figure"]) == ("decode", 7)
    assert [target["met"] for target in found["targets"]] == [met]
    assert found["machine"]["others"] is None or found["machine"]["others"] >= 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["parallel", "--turns=0"], "there is at least one turn"),
        (["decode", "--peer=other="], "NAME=COMMAND is wanted"),
        (["decode", "--peer=other='"], "No closing quotation"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(words)
    assert complaint in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_every_benchmark_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        bench.main([name, "--help"])
    shown = capsys.readouterr().out
    for option in ("--json", "--peer", "--busy", "--blas-threads"):
        assert option in shown


def test_a_blas_that_cannot_be_loaded_is_told_before_anything_runs() -> None:
    command = [sys.executable, "-m", "scripts.tools.bench", "decode", "--blas=/no/such/library"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("scripts/bench: --blas /no/such/library: cannot be loaded")
    assert not ended.stdout
