"""The suite notices runners that do one thing wrong, and says in one line what it was."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from scripts.tools.conformance import CASES, Case, Runners, run
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib import GENERATIONS, G, Generation
from tests.tools.conformance.breakages import BROKEN
from tests.tools.conformance.proxy import Behind, Breakage

SPOILED = Path(__file__).with_name("spoiled.py")
MANNERS = {
    "strict": {
        "G':2-verbose": "LoadError: mlx runner exited unexpectedly",
        "G':3-spelled-with-equals": "LoadError: mlx runner exited unexpectedly",
        "11.1-without-engine-flag": "LoadError: mlx runner exited unexpectedly",
    },
    "lenient": {"4-another-engine": "it became ready"},
    "silent": {
        "5-missing-model": "the user reads 'mlx runner exited unexpectedly: %!w(<nil>)'",
        "6-unsupported-architecture": "what the user reads: 'mlx runner exited unexpectedly: %!w(<nil>)'",
        "7-port-taken": "exit status 0",
    },
    "noisy": {
        "12-session-without-marker": "hosts take for an error: ['note: mlx: using device gpu']",
        "79-left-at-the-end": "hosts take for an error: ['note: mlx: using device gpu']",
    },
    "chatty": {"14-log-level": "OLLAMA_DEBUG=0: {'"},
    "literal": {"13-quoted-models-dir": "Error: no models"},
    "open": {"1-loopback-only": "it listens on 127.0.0.2 too"},
    "mute": {"8-not-ready-early": "accepted and not answered"},
    "tracing": {
        "9-sigint-idle": "it wrote 'Traceback'",
        "10-sigint-prefill": "it wrote 'Traceback'",
        "10-sigint-decode": "it wrote 'Traceback'",
    },
    "stubborn": {"9-sigint-idle": "it did not exit"},
    "parent": {"11-pipe-let-go": "somebody held its output", "11.7-sigkill": "somebody held its output"},
}
"""The faults of tests/tools/conformance/spoiled.py, the cases that fail with each, and part of the reason."""

SLOW = {
    "answers one connection at a time": {"18-status-during-decode", "34-refused-while-busy", "73-while-generating"},
    "goes on for nobody": {"76-left-in-prefill"},
    "noisy": {"79-left-at-the-end"},
    "tracing": {"10-sigint-prefill", "10-sigint-decode"},
    "parent": {"11.7-sigkill"},
}
"""Cases that take seconds to fail with these; a quick one beside them fails for the same reason."""


def split(table: Mapping[str, Iterable[str]]) -> list[object]:
    """Name and cases for the parameters of a test, those of `SLOW` as a slow one."""
    params: list[object] = []
    for name, cases in table.items():
        slow = [case for case in cases if case in SLOW.get(name, ())]
        params.append(pytest.param(name, [case for case in cases if case not in slow], id=name))
        if slow:
            params.append(pytest.param(name, slow, id=f"{name}, slowly", marks=pytest.mark.slow))
    return params


def of(name: str) -> tuple[Case, Generation]:
    """`A:40-eos`, or `40-eos` for the newest generation that has a run of its own."""
    letter, _, id_ = name.rpartition(":")
    (case,) = (case for case in CASES if case.id == id_)
    runs = [generation for generation, part in case.parts(GENERATIONS).items() if part is generation]
    generation = next((one for one in GENERATIONS if one.letter == letter), runs[-1])
    assert generation in runs
    return case, generation


@pytest.mark.parametrize(("name", "cases"), split({name: broken.fails for name, broken in BROKEN.items()}))
async def test_a_breakage_fails_its_cases(name: str, cases: list[str], runners: Runners) -> None:
    for case, generation in map(of, cases):
        outcome = await run(case, runners, generation, Behind(runners, generation, BROKEN[name].breakage))
        assert outcome.mark == "fail", f"{case.id} {generation.letter}: {outcome}"
        assert outcome.reason.isprintable()


@pytest.mark.slow
async def test_an_honest_proxy_fails_none_of_them(runners: Runners) -> None:
    """Else the tests above would prove nothing."""
    for case, generation in sorted({of(name) for broken in BROKEN.values() for name in broken.fails}, key=str):
        outcome = await run(case, runners, generation, Behind(runners, generation, Breakage()))
        assert outcome.mark == "pass", f"{case.id} {generation.letter}: {outcome}"


@pytest.mark.parametrize(("manner", "cases"), split(MANNERS))
async def test_bad_manners_fail_their_cases(manner: str, cases: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.tools.conformance.spawn.ANSWER_S", 0.3)
    with Runners([sys.executable, "-P", str(SPOILED), manner]) as runners:
        for name in cases:
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


def test_every_case_is_failed_by_something() -> None:
    failed = {name.rpartition(":")[2] for broken in BROKEN.values() for name in broken.fails}
    failed |= {name.rpartition(":")[2] for names in MANNERS.values() for name in names} | {"51-failure"}
    assert {case.id for case in CASES} - failed == {"80-idle-connection"}, "which is 80-keep-alive with 95 s in between"


def test_what_fails_slowly_fails_quickly_too() -> None:
    cases = {name: {*broken.fails} for name, broken in BROKEN.items()} | {name: {*MANNERS[name]} for name in MANNERS}
    assert all(slow < cases[name] for name, slow in SLOW.items())
