"""Whatever call breaks while several requests run: it ends at most the one that it concerns, and the others are right.

A busy day is served again and again, each time with a fault, as in `test_any_call`: requests that begin alike, that
join answers under way, that leave while their prompts are read or their answers written, with room for all of them or
for few.
"""

import gc
import random
from collections import Counter
from functools import cache

import pytest

from runner.engine.events import Failed
from scripts.tools.conformance.fault_points import COMPANY_ONLY, FATAL, watching
from scripts.tools.models.tiny import KINDS
from tests.lib.memory import held_bytes
from tests.lib.tiny_engine import BATCHABLE
from tests.process.faults.bench import Bench, active_bytes, close_restore_points
from tests.process.faults.days import busy_day, expected
from tests.process.faults.test_any_call import ALONE, SEVERAL, Injector, Plan, Setup, serve

pytestmark = pytest.mark.usefixtures("quiet")
WIDE, CLOSE = ("trie", 2.0), ("trie", 1.5)
"""With twice the bytes of all that is kept at the end of a day the requests of a wave run together; with little more
than these some wait, and what nobody uses goes."""
SETUPS: tuple[Setup, ...] = (WIDE, CLOSE)
FEW_KINDS = ("llama", "gemma3", "qwen3_next")
NEVER_LATE = frozenset({"join"})
"""What hands everything over in its last line, after which nothing is left to fail."""
TOGETHER = sorted(COMPANY_ONLY - set(FATAL) | {SEVERAL, "part", "part rows"})
"""What there is only in company, or is more in it."""


def serve_busy(kind: str, setup: Setup, injector: Injector) -> Bench:
    """A busy day, and its first wave again."""
    waves = busy_day(kind)
    return serve(kind, setup, injector, (*waves, waves[0]))


@cache
def calls(kind: str, setup: Setup) -> Counter[str]:
    """How often a busy day without a fault comes to each point."""
    injector = Injector()
    bench = serve_busy(kind, setup, injector)
    assert bench.compared >= 60
    assert bench.most_together > 1 or kind not in BATCHABLE
    return injector.calls


def any_plan(point: str, kind: str, setup: Setup, chance: random.Random) -> Plan:
    """A call of that point in such a day."""
    fault = chance.choice(("fault", "python memory", "mlx memory"))
    return Plan(
        point,
        chance.randrange(calls(kind, setup)[point]),
        fault,
        late=chance.random() < 0.3 and point not in NEVER_LATE,
    )


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_busy_day_comes_to_every_point_of_company(kind: str) -> None:
    assert calls(kind, WIDE).keys() | calls(kind, CLOSE).keys() >= COMPANY_ONLY | {SEVERAL}


@pytest.mark.parametrize("point", TOGETHER)
def test_a_fault_in_company_ends_no_other_request(point: str) -> None:
    chance = random.Random(point)
    kinds = chance.sample(FEW_KINDS, len(FEW_KINDS))
    kind, setup = next((kind, setup) for kind in kinds for setup in SETUPS if calls(kind, setup)[point])
    serve_busy(kind, setup, Injector(any_plan(point, kind, setup, chance)))


def test_two_that_are_half_joined_are_not_met_again() -> None:
    """A batch has been made of both, and neither knows."""
    for at in range(2):
        serve_busy("llama", WIDE, Injector(Plan("join rows", at, late=True)))


def test_those_that_leave_are_told_of_once() -> None:
    for at in range(0, calls("llama", WIDE)["part"], 3):
        serve_busy("llama", WIDE, Injector(Plan("part", at)))


def test_layers_are_not_shown_a_token_twice_when_something_breaks_behind_it() -> None:
    """They have caught up with the batch, and the next call raises."""
    for at in range(calls("qwen3_next", WIDE)["absorb"]):
        serve_busy("qwen3_next", WIDE, Injector(Plan("absorb", at, late=True)))


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_fault_of_one_in_company_ends_no_other_request(kind: str) -> None:
    chance = random.Random(kind)
    for point in chance.sample(sorted(ALONE - set(FATAL)), 5):
        setup = next((setup for setup in SETUPS if calls(kind, setup)[point]), None)
        if setup is not None:
            serve_busy(kind, setup, Injector(any_plan(point, kind, setup, chance)))


@pytest.mark.parametrize(
    "point", ["return to prefill", "read", "forward", "release layers", "end session", "part layers"]
)
def test_a_fault_while_those_that_ran_together_go_on_alone_ends_one_of_them(point: str) -> None:
    """The first call of the point after a forward of several has failed."""
    serve_busy("gemma3", WIDE, Injector(Plan(SEVERAL, 9), Plan(point, 0)))


@pytest.mark.parametrize("point", ["sample together", "forward", "unlock", "reset"])
def test_a_fault_that_lasts_as_long_as_a_wave_is_over_with_it(point: str) -> None:
    """Whoever has met it may have failed; nothing is left of it for those who come later."""
    chance = random.Random(point)
    kind = chance.choice(FEW_KINDS)
    serve_busy(kind, WIDE, Injector(any_plan(point, kind, WIDE, chance)._replace(lasting=True)))


@pytest.mark.parametrize("point", ["begin", "end session"])
def test_what_a_dropped_cache_held_is_free_at_once_though_others_went_on(point: str) -> None:
    wave = busy_day("gemma3")[0]
    for ask in wave:
        expected("gemma3", tuple(ask.prompt), ask.say)
    with close_restore_points():
        bench = Bench("gemma3", "trie")
        before = active_bytes()
        gc.disable()
        try:
            with watching(Injector(Plan(point, 1, late=True)), point):
                outcomes = bench.serve(wave)
            assert sum(isinstance(outcome.end, Failed) for outcome in outcomes) == (point == "begin")
            bench.clear()
            assert held_bytes() == before
        finally:
            gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=["wide", "close"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_anywhere_in_company_ends_no_other_request(kind: str, setup: Setup) -> None:
    for point in sorted(calls(kind, setup).keys() - set(FATAL)):
        for number in range(3):
            serve_busy(kind, setup, Injector(any_plan(point, kind, setup, random.Random(f"{point} {kind} {number}"))))
