"""The table and scripts/conformance: marks, reasons, exit statuses."""

import sys
from pathlib import Path

import pytest

from scripts.tools.conformance import CASES, Case, Outcome
from scripts.tools.conformance.main import main
from scripts.tools.conformance.report import Report, as_text
from scripts.tools.host.lib import A, E, F, G, Generation
from tests.tools.conformance.test_failures import SPOILED

COLUMNS = (A, E, F, G)


@pytest.fixture
def report() -> Report:
    """Greedy failed for generation A, keep-alive could not be tried, the others passed."""
    cases = [case for case in CASES if case.id == "33-image-tags" or case.number in ("36", "54", "80")]
    outcomes = {run: Outcome("pass") for run in runs(cases)}
    outcomes |= {run: Outcome("fail", "too warm") for run in outcomes if run[0].number == "36" and run[1] is A}
    outcomes |= {run: Outcome("not run", "no time") for run in outcomes if run[0].number == "80"}
    return Report(["./mine", "a b"], cases, COLUMNS, outcomes)


def runs(cases: list[Case]) -> list[tuple[Case, Generation]]:
    return [(case, part) for case in cases for part in case.parts(COLUMNS).values() if isinstance(part, Generation)]


def test_a_cell_says_how_it_went_or_why_not(report: Report) -> None:
    marks = {case.id: [cell.mark for cell in report.cells(case).values()] for case in report.cases}
    assert marks == {
        "33-image-tags": ["n/a", "n/a", "pass", "pass"],
        "36-greedy": ["fail", "pass", "pass", "pass"],
        "54-absent-seed-is-zero": ["n/a", "pass", "pass", "pass"],
        "80-keep-alive": ["not run"] * 4,
        "80-idle-connection": ["not run"] * 4,
    }
    reasons = [report.cells(case)["A"].reason for case in report.cases]
    assert reasons[0] == "the host sends no Media"
    assert reasons[1:] == ["too warm", "the host sends no seed", "no time", "no time"]


def test_the_text_has_a_table_and_a_line_for_each_failure(report: Report) -> None:
    lines = as_text(report).splitlines()
    assert lines[0].split() == ["A", "E", "F", "G"]
    assert lines[2].split() == ["36-greedy", "FAIL", "ok", "ok", "ok"]
    assert lines[-4:] == [
        "? 80-keep-alive: no time",
        "? 80-idle-connection: no time",
        "FAIL 36-greedy A: too warm",
        "cases: 5; runs: 11; passed: 8; failed: 1; could not be tried: 2",
    ]


def test_an_executable_that_does_not_start_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "36", sys.executable, "-c", "raise SystemExit('Error: not today')"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"starting {sys.executable} -c ")
    assert told.endswith("does not start: mlx runner failed: Error: not today (exit: exit status 1)\n")
    assert main(["./not-there"]) == 2
    assert "./not-there does not start: [Errno 2]" in capsys.readouterr().err


def test_a_failure_is_exit_status_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--case", "40", "--case", "51", "--generation", "G", "--cwd", str(tmp_path), "--markdown", "t.md"]
    assert main([*words, sys.executable, "-P", str(SPOILED), "noisy"]) == 1
    told = capsys.readouterr().out
    assert "FAIL 40-eos G: hosts take this output for an error: note: mlx: " in told
    assert told.endswith("cases: 2; runs: 2; failed: 1; could not be tried: 1\n")
    assert "| ✗[^1] |" in (tmp_path / "t.md").read_text(encoding="utf-8")


def test_a_runner_of_two_ranks_is_asked_what_it_answers_as_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "2", "--case", "51", "--case", "12.39-40", "--generation", "H"]) == 0
    assert capsys.readouterr().out.endswith("cases: 1; runs: 1; passed: 1\n")
