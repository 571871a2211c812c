"""The parts that all benchmarks share: rounds, tables and targets, the busy machine, `all`, and the command line."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench import machine, run_all
from scripts.tools.bench import options as exits
from scripts.tools.bench.machine import MOST_OTHERS, BusyError, Others, check_quiet
from scripts.tools.bench.report import Table, Target, interleave, targets_table, text_of

QUIET = check_quiet, Others.check  # before the fixture of this folder takes their place


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


# --- tables and targets


def test_a_target_is_met_at_its_bound() -> None:
    assert Target("most", 1.0, 1.0).met
    assert not Target("most", 1.1, 1.0).met
    assert Target("least", 1.0, 1.0, most=False).met
    assert not Target("least", 0.9, 1.0, most=False).met
    assert Target("what", 2.0, 1.0, unit=" s").data() == {
        "what": "what",
        "value": 2.0,
        "bound": 1.0,
        "most": True,
        "unit": " s",
        "met": False,
    }


def test_figures_stand_on_the_right_and_words_on_the_left() -> None:
    table = Table("a title", ("", "ms", "what"), [("ours", "1.5", "short"), ("the other", "120.0", "much longer")])
    assert list(table.lines()) == [
        "a title",
        "               ms   what",
        "─" * 31,
        "ours          1.5   short",
        "the other   120.0   much longer",
    ]


def test_targets_are_a_table_and_empty_tables_are_left_out() -> None:
    targets = [Target("speed", 0.9812, 0.97, most=False), Target("start", 312.4, 300.0, unit=" ms")]
    assert text_of([targets_table(targets), targets_table([])], note="note").split("\n") == [
        "targets",
        "         found   target",
        "─" * 40,
        "speed    0.981   at least 0.97    met",
        "start   312 ms   at most 300 ms   MISSED",
        "",
        "note",
    ]
    assert text_of([targets_table([])], "head", "note") == "head\n\nnote"


# --- the busy machine


class Machine:
    """A Linux machine of two cores whose counters a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        self.now, self.ours, self.others = 100.0, 0.0, 0.0
        self._file = file
        ticks = os.sysconf("SC_CLK_TCK")
        monkeypatch.setattr(machine, "_STAT", file)
        monkeypatch.setattr(machine, "perf_counter", lambda: self.now)
        monkeypatch.setattr(machine, "sleep", self.run)
        monkeypatch.setattr(os, "times", lambda: (self.ours, 0.0, 0.0, 0.0, 0.0))
        monkeypatch.setattr(sys, "platform", "linux")
        self._ticks = ticks
        self.share = 0.0
        self.run(0.0)

    def run(self, seconds: float, ours: float = 0.0) -> None:
        self.now += seconds
        self.ours += ours * seconds
        self.others += self.share * seconds
        busy = int((self.ours + self.others) * self._ticks)
        idle = int(2 * self.now * self._ticks) - busy
        self._file.write_text(f"cpu {busy} 0 0 {idle} 0 0 0 0 77 0\ncpu0 1 2 3\n")


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setattr(Others, "check", QUIET[1])
    return Machine(monkeypatch, tmp_path / "stat")


def test_what_we_use_ourselves_is_nobody_elses(linux: Machine) -> None:
    others = Others()
    linux.run(10.0, ours=1.5)
    assert others.cores() == pytest.approx(0.0, abs=0.01)
    linux.share = 0.5
    linux.run(10.0, ours=1.0)
    assert others.cores() == pytest.approx(0.25, abs=0.01)
    with pytest.raises(BusyError, match=r"the machine is busy: others use 0\.25 of its \d+ cores"):
        others.check()


def test_a_machine_is_quiet_up_to_a_share_of_a_core(linux: Machine) -> None:
    linux.share = MOST_OTHERS - 0.02
    QUIET[0]()
    linux.share = MOST_OTHERS + 0.02
    with pytest.raises(BusyError):
        QUIET[0]()


def test_elsewhere_the_load_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_STAT", tmp_path / "nothing")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.9, 0.0, 0.0))
    QUIET[0]()
    assert Others().cores() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (4.1, 0.0, 0.0))
    with pytest.raises(BusyError, match=r"its load is 4\.1 on 8 cores"):
        QUIET[0]()


def test_a_busy_machine_gets_no_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def busy() -> None:
        raise BusyError("the machine is busy: others use 1.00 of its 2 cores")

    monkeypatch.setattr(bench, "check_quiet", busy)
    assert bench.main(["cache"]) == exits.BUSY
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].endswith("wait until they are done, or measure all the same: --busy")
    assert "targets" not in shown.out


def test_a_machine_that_became_busy_gets_none_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy(_: Others) -> None:
        raise BusyError("the machine is busy")

    monkeypatch.setattr(Others, "check", busy)
    monkeypatch.setattr(bench, "_module", lambda name: Module(met=True))
    assert bench.main(["cache"]) == exits.BUSY
    assert "targets" not in capsys.readouterr().out
    assert bench.main(["cache", "--busy"]) == exits.MET


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

    def plot(self, path: Path) -> None:
        path.write_bytes(b"PNG")


@pytest.mark.parametrize("met", [True, False])
def test_the_status_says_whether_all_targets_are_met(
    met: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "_module", lambda name: Module(met=met))
    file = tmp_path / "found.json"
    assert bench.main(["cache", f"--json={file}"]) == (exits.MET if met else exits.MISSED)
    shown = capsys.readouterr().out
    assert "the table" in shown
    assert ("MISSED" in shown) != met
    found = json.loads(file.read_text())
    assert (found["benchmark"], found["figure"]) == ("cache", 7)
    assert [target["met"] for target in found["targets"]] == [met]
    assert found["machine"]["others"] is None or found["machine"]["others"] >= 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--peer=other"], "NAME=COMMAND is wanted"),
        (["--peer=other="], "NAME=COMMAND is wanted"),
        (["--peer==true"], "NAME=COMMAND is wanted"),
        (["--peer=other='"], "No closing quotation"),
    ],
)
def test_a_peer_has_a_name_and_a_command(
    words: Sequence[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["cache", *words])
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("name", [*bench.BENCHMARKS, bench.ALL])
def test_every_benchmark_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        bench.main([name, "--help"])
    shown = capsys.readouterr().out
    for option in ("--json", "--plot", "--peer", "--busy", "--blas-threads"):
        assert option in shown


# --- all


class Runs:
    """In place of processes: which words they were given, and what each left behind."""

    def __init__(self, statuses: Sequence[int]) -> None:
        self.words: list[list[str]] = []
        self._statuses = [*statuses]

    def __call__(self, words: Sequence[str], _: object) -> int:
        self.words.append([*words])
        status = self._statuses.pop(0)
        if status in exits.MEASURED:
            file = Path(words[words.index("--json") + 1])
            target = Target("speed", 1.0 + 2 * status, 2.0)
            file.write_text(json.dumps({"figure": len(self.words), "targets": [target.data()]}))
        return status


def run_several(monkeypatch: pytest.MonkeyPatch, statuses: Sequence[int], *words: str) -> tuple[int, Runs]:
    runs = Runs(statuses)
    monkeypatch.setattr(run_all, "run_one", runs)
    monkeypatch.setattr(bench, "BENCHMARKS", dict(list(bench.BENCHMARKS.items())[: len(statuses)]))
    return bench.main([bench.ALL, *words]), runs


def test_all_runs_each_and_gathers_what_they_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--json=-", "--seed=5", "--busy", "--peer=other=run 'it now'", "--blas-threads=2"]
    status, runs = run_several(monkeypatch, [0, 1], *words)
    assert status == exits.MISSED
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    first, second = list(bench.BENCHMARKS)[:2]
    assert {name: each["figure"] for name, each in found["benchmarks"].items()} == {first: 1, second: 2}
    assert [(target["what"], target["met"]) for target in found["targets"]] == [
        (f"{first}: speed", True),
        (f"{second}: speed", False),
    ]
    assert "MISSED" in shown.err
    assert [words[0] for words in runs.words] == [first, second]
    rest = runs.words[0][3:]
    assert rest == [*("--seed", "5", "--blas", "auto", "--blas-threads", "2", "--peer", "other=run 'it now'", "--busy")]


def test_one_that_could_not_be_measured_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, runs = run_several(monkeypatch, [0, exits.BUSY, 1], "--json=-")
    assert status == exits.BUSY
    assert len(runs.words) == 3
    shown = capsys.readouterr()
    names = list(bench.BENCHMARKS)
    assert set(json.loads(shown.out)["benchmarks"]) == {names[0], names[2]}
    assert shown.err.splitlines()[-1] == f"not measured: {names[1]}"


def test_all_meets_its_targets_when_each_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    status, runs = run_several(monkeypatch, [0, 0], f"--plot={tmp_path / 'pictures'}")
    assert status == exits.MET
    assert (tmp_path / "pictures").is_dir()
    names = list(bench.BENCHMARKS)
    assert [words[words.index("--plot") + 1] for words in runs.words] == [
        str(tmp_path / "pictures" / f"{name}.png") for name in names[:2]
    ]
