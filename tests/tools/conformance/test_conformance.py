"""Every case against this repository's runner as the newest generation of hosts sees it, and one as each older one."""

import sys
from collections.abc import Iterator

import pytest

from scripts.tools.conformance import CASES, Case, Outcome, Runners, models, run
from scripts.tools.conformance.models import MAIN
from scripts.tools.conformance.report import Report, as_markdown
from scripts.tools.conformance.this_runner import FAULTY, RUNNER
from scripts.tools.host.lib import G_PRIME, GENERATIONS, Generation, H
from tests import ROOT

DOCUMENT = ROOT / "docs" / "compatibility.md"
ARGUMENTS = "--slow --markdown docs/compatibility.md"
RUNS = [
    (case, generation) for case in CASES for generation, part in case.parts(GENERATIONS).items() if part is generation
]
"""All that the document shows; `scripts/conformance` does them."""
MODELS = {getattr(models, name) for name in dir(models) if name.isupper()} - {models.UNSUPPORTED, models.ARCHITECTURE}
SMOKE = "21-own-words"
CHOSEN = [
    run
    for run, (case, _) in zip(RUNS, [*RUNS[1:], (None, None)], strict=True)
    if case is not run[0] or run[0].id == SMOKE
]
"""The newest generation of each case, and each of one case."""


@pytest.fixture(scope="session")
def runners(request: pytest.FixtureRequest) -> Iterator[Runners]:
    """One for all cases. What they share is started before the first of them, and so belongs to none: the models that
    their modules name."""
    chosen = {item.nodeid.partition("[")[2] for item in request.session.items}
    modules = {case.check.__module__ for case, one in CHOSEN if f"{case.id}-{one.letter}]" in chosen}
    named = {value for module in modules for value in vars(sys.modules[module]).values() if isinstance(value, str)}
    with Runners(RUNNER, faulty=FAULTY) as runners:
        for model in {MAIN} | MODELS & named:
            runners.shared(H, model)
        runners.shared(G_PRIME, MAIN)
        yield runners


@pytest.mark.parametrize(
    ("case", "generation"),
    [
        pytest.param(*run, id=f"{run[0].id}-{run[1].letter}", marks=[pytest.mark.slow] if run[0].slow else [])
        for run in CHOSEN
    ],
)
async def test_case(case: Case, generation: Generation, runners: Runners) -> None:
    outcome = await run(case, runners, generation)
    if outcome.error is not None:
        raise outcome.error
    if outcome.mark != "pass":
        pytest.fail(f"{outcome.mark}: {outcome.reason}", pytrace=False)


def test_every_case_of_the_protocol_is_there() -> None:
    """Of 12 those are left out that ask for decision models, and 72, 73 and 78, which look inside: they are tests of
    this repository."""
    numbers = {number for case in CASES for number in numbers_of(case)}
    later = [
        *(f"11.{number}" for number in range(1, 10)),
        *(f"12.{number}" for number in (*range(1, 57), *range(61, 72), *range(74, 78), *range(79, 85))),
    ]
    assert numbers == {str(number) for number in range(1, 81)} | {*later}
    assert len({case.id for case in CASES}) == len(CASES)
    assert all(case.title.endswith(".") and "\n" not in case.title for case in CASES)


def numbers_of(case: Case) -> list[str]:
    section, _, number = case.number.rpartition(".")
    first, _, last = number.partition("-")
    return [f"{section}.{each}".removeprefix(".") for each in range(int(first), int(last or first) + 1)]


def test_the_document_shows_these_cases_all_passed() -> None:
    """If it does not: scripts/conformance --slow --markdown docs/compatibility.md"""
    passed = {run: Outcome("pass") for run in RUNS}
    report = Report((), CASES, GENERATIONS, passed)
    assert DOCUMENT.read_text(encoding="utf-8") == as_markdown(report, "this runner", ARGUMENTS)
