"""The table and scripts/conformance: marks, reasons, exit statuses, and whose directory words are looked up in."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.tools.conformance import CASES, Case, Outcome, Runners, run
from scripts.tools.conformance.main import MOST_LATE, SILENT, main, run_all
from scripts.tools.conformance.models import MAIN
from scripts.tools.conformance.report import Report, as_json, as_markdown, as_text
from scripts.tools.host.lib import A, E, F, G, Generation, free_port
from tests import ROOT
from tests.tools.conformance.test_failures import SPOILED

SCRIPT = ROOT / "scripts" / "conformance"
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


def test_one_run_speaks_for_generations_that_are_alike() -> None:
    case = next(case for case in CASES if case.number == "25")
    report = Report((), [case], COLUMNS, {(case, G): Outcome("pass")})
    assert [cell.mark for cell in report.cells(case).values()] == ["same", "same", "same", "pass"]
    report = Report((), [case], COLUMNS, {(case, G): Outcome("fail", "no")})
    assert [cell.mark for cell in report.cells(case).values()] == ["fail"] * 4


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


def test_the_document_has_a_note_for_each_reason(report: Report) -> None:
    text = as_markdown(report, "`./mine`", "./mine")
    assert "Whether `./mine` does what" in text
    row = next(line for line in text.splitlines() if line.startswith("| 36 |"))
    assert row.endswith("| ✗[^2] | ✓ | ✓ | ✓ |")
    assert "[^2]: Too warm." in text
    assert text.count("\n[^") == 4


def test_who_does_no_more_than_the_original_has_not_failed() -> None:
    cases = [case for case in CASES if case.id in ("45-long-text", "52-both-spellings")]
    outcomes = {run: Outcome("fail", "too long") for run in runs(cases)} | {(cases[1], G): Outcome("pass")}
    report = Report((), cases, COLUMNS, outcomes)
    assert {cell.mark for cell in report.cells(cases[0]).values()} == {"less"}
    assert report.failures == []
    assert report.less[-1] == "45-long-text G: too long"
    lines = as_text(report).splitlines()
    assert lines[1].split() == ["45-long-text", *["less"] * 4]
    assert "less 45-long-text G: too long" in lines
    assert lines[-1].endswith("passed: 1; no more than the original: 4")
    document = as_markdown(report, "`./mine`", "./mine")
    row = next(line for line in document.splitlines() if line.startswith("| 45 |"))
    assert "(*beyond the original*)" in row
    assert row.count("○") == 4
    data = as_json(report)
    assert (data["failures"], data["less"]) == ([], report.less)


def test_what_is_beyond_the_original() -> None:
    found = {case.id for case in CASES if case.beyond}
    assert found == {"45-long-text", "45-long-logprobs", "52-both-spellings", "67-utf8-tail"}


async def test_runners_heed_sigint_though_the_shell_has_this_process_ignore_it() -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Runners([sys.executable, "-c", code]) as runners:
            process = runners.start(G, [], free_port())
            assert process.wait(30) == 0
        assert process.output.lines == ["False"]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "as it was found"
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_data_have_it_all(report: Report) -> None:
    data = json.loads(json.dumps(as_json(report)))
    assert data["command"] == ["./mine", "a b"]
    assert data["failures"] == ["36-greedy A: too warm"]
    assert data["cases"][1]["generations"]["A"] == {"mark": "fail", "reason": "too warm"}


def test_an_executable_that_does_not_start_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "36", sys.executable, "-c", "raise SystemExit('Error: not today')"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"starting {sys.executable} -c ")
    assert told.endswith("does not start: mlx runner failed: Error: not today (exit: exit status 1)\n")
    assert main(["./not-there"]) == 2
    assert "./not-there does not start: [Errno 2]" in capsys.readouterr().err


def test_what_never_listens_is_waited_for_once_and_the_limit_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.tools.conformance.runners.READY_S", 0.5)
    ports = iter([free_port()])  # for one start
    monkeypatch.setattr("scripts.tools.conformance.runners.free_port", lambda: next(ports))
    assert main([sys.executable, "-c", "import time; time.sleep(60)"]) == 2
    assert capsys.readouterr().err.endswith(" does not start: timeout waiting for mlx runner to start within 0.5 s\n")


async def test_after_a_run_that_took_too_long_processes_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (case for case in CASES if case.id == "40-eos")
    with Runners([sys.executable, "-P", str(SPOILED), "dumb"]) as runners:
        process = runners.shared(G, MAIN)
        monkeypatch.setattr("scripts.tools.conformance.outcome.LIMIT_S", 0.2)
        outcomes = await run_all(runners, [case], [G], slow=False)
        assert outcomes[case, G][:2] == ("fail", "it took too long")
        assert process.exit_status is not None
        assert runners.shared(G, MAIN) is not process


async def test_a_runner_that_does_not_answer_is_left_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After too many runs in a row that took too long; a pass between them starts the count anew."""
    late = Outcome("fail", "it took too long", error=TimeoutError())
    scripted = [late, Outcome("pass"), *[late] * MOST_LATE]
    told = iter(scripted)

    async def scripted_run(*words: object) -> Outcome:
        return next(told)

    monkeypatch.setattr("scripts.tools.conformance.main.run", scripted_run)
    cases = [case for case in CASES if G in case.parts([G]).values()][: len(scripted) + 2]
    outcomes = await run_all(Runners(["nobody"]), cases, [G], slow=False)
    assert list(outcomes.values()) == [*scripted, SILENT, SILENT]
    assert len(capsys.readouterr().err.splitlines()) == len(scripted), "a line for each"


async def test_a_slow_case_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.tools.conformance.outcome.LIMIT_S", 0.01)

    async def check(target: object) -> None:
        await asyncio.sleep(0.05)

    marks = [
        (await run(Case("1", "a", "A.", check, lambda _: None, slow=slow), Runners(["nobody"]), G)).mark
        for slow in (False, True)
    ]
    assert marks == ["fail", "pass"]


@pytest.mark.parametrize("words", [["--case", "81"], ["--case", "36-gready"], ["--generation", "H"], ["--nonsense"]])
def test_wrong_usage_is_exit_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert words[1 if len(words) > 1 else 0] in capsys.readouterr().err


def test_a_failure_is_exit_status_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [
        "--case",
        "40",
        "--case",
        "51",
        "--generation",
        "G",
        "--json",
        "--cwd",
        str(tmp_path),
        "--markdown",
        "t.md",
    ]
    assert main([*words, sys.executable, "-P", str(SPOILED), "noisy"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [case["generations"]["G"]["mark"] for case in data["cases"]] == ["fail", "not run"]
    assert data["failures"][0].startswith("40-eos G: hosts take this output for an error: note: mlx: ")
    assert "| ✗[^1] |" in (tmp_path / "t.md").read_text(encoding="utf-8")


def test_words_are_looked_up_where_the_caller_is(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m runner "$@"\n')
    mine.chmod(0o755)
    words = [str(SCRIPT), "--case", "40", "--generation", "A", "--markdown", "table.md", "./mine"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("starting ./mine ...\n[1/1] 40-eos A\n")
    assert done.stdout.endswith("cases: 1; runs: 1; passed: 1\n")
    assert "| 40 |" in (tmp_path / "table.md").read_text(encoding="utf-8")
