"""The suite notices runners that do one thing wrong, and says in one line what it was."""

import sys
from pathlib import Path

import pytest

from scripts.tools.conformance import CASES, Case, Runners, run
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib import GENERATIONS, G, Generation

SPOILED = Path(__file__).with_name("spoiled.py")
MANNERS = {
    "noisy": {"12-session-without-marker": "hosts take for an error: ['note: mlx: using device gpu']"},
    "short": {"39-context-end": "text, reason, count with"},
    "tracing": {"9-sigint-idle": "it wrote 'Traceback'"},
}
"""The faults of tests/tools/conformance/spoiled.py, the cases that fail with each, and part of the reason."""


def of(name: str) -> tuple[Case, Generation]:
    """`A:40-eos`, or `40-eos` for the newest generation that has a run of its own."""
    letter, _, id_ = name.rpartition(":")
    (case,) = (case for case in CASES if case.id == id_)
    runs = [generation for generation, part in case.parts(GENERATIONS).items() if part is generation]
    generation = next((one for one in GENERATIONS if one.letter == letter), runs[-1])
    assert generation in runs
    return case, generation


@pytest.mark.parametrize("manner", MANNERS)
async def test_bad_manners_fail_their_cases(manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.tools.conformance.spawn.ANSWER_S", 0.3)
    with Runners([sys.executable, "-P", str(SPOILED), manner]) as runners:
        for name in MANNERS[manner]:
            outcome = await run(of(name)[0], runners, of(name)[1])
            assert outcome.mark == "fail", f"{name}: {outcome}"
            assert MANNERS[manner][name] in outcome.reason
            assert outcome.reason.isprintable()


async def test_a_runner_without_a_fault_fails_the_case_that_asks_for_one() -> None:
    case, generation = of("51-failure")
    with Runners(RUNNER, faulty=RUNNER) as runners:
        assert "no error after" in (await run(case, runners, generation)).reason
    with Runners(RUNNER) as runners:
        outcome = await run(case, runners, G)
    assert outcome.mark == "not run"
    assert "--faulty" in outcome.reason
