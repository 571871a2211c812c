"""A fault in any call while several requests run ends at most the request that it belongs to; the others are right.

The concurrent workload is served again and again, each time with a fault, as in `test_any_call`: requests share
prefixes, join a running batch, and disconnect during prefill or decode, with room for all of them or for few.
"""

import gc
import random
from collections import Counter
from functools import cache

import pytest

from runner.engine.events import Failed
from scripts.tools.conformance.fault_points import CONCURRENT_ONLY, FATAL, watching
from scripts.tools.models.tiny import KINDS
from tests.lib.memory import held_bytes
from tests.lib.tiny_engine import BATCHABLE
from tests.process.faults.driven_engine import DrivenEngine, active_bytes, close_checkpoints
from tests.process.faults.test_any_call import ALONE, SEVERAL, Injector, Plan, Setup, serve
from tests.process.faults.workloads import concurrent_waves, expected

pytestmark = pytest.mark.usefixtures("quiet")
WIDE, CLOSE = ("trie", 2.0), ("trie", 1.5)
"""With twice the bytes that the cache keeps without a budget, the requests of a wave run together; with half as much
again, unused entries are evicted and some requests wait."""
SETUPS: tuple[Setup, ...] = (WIDE, CLOSE)
FEW_KINDS = ("llama", "gemma3", "qwen3_next")
NEVER_LATE = frozenset({"join"})
"""Calls whose last line hands everything over: a fault after it has nothing left to break."""
TOGETHER = sorted(CONCURRENT_ONLY - set(FATAL) | {SEVERAL, "part", "part rows"})
"""Points that only concurrent requests reach, or that do more for them."""


def serve_concurrently(kind: str, setup: Setup, injector: Injector) -> DrivenEngine:
    """Serves the concurrent workload, and its first wave again."""
    waves = concurrent_waves(kind)
    return serve(kind, setup, injector, (*waves, waves[0]))


@cache
def calls(kind: str, setup: Setup) -> Counter[str]:
    """Returns how often the concurrent workload without a fault reaches each point."""
    injector = Injector()
    driven = serve_concurrently(kind, setup, injector)
    assert driven.compared >= 60
    assert driven.most_together > 1 or kind not in BATCHABLE
    return injector.calls


def any_plan(point: str, kind: str, setup: Setup, chance: random.Random) -> Plan:
    """Plans a fault in a random call at this point of the workload."""
    fault = chance.choice(("fault", "python memory", "mlx memory"))
    return Plan(
        point,
        chance.randrange(calls(kind, setup)[point]),
        fault,
        late=chance.random() < 0.3 and point not in NEVER_LATE,
    )


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_the_concurrent_workload_reaches_every_concurrent_point(kind: str) -> None:
    assert calls(kind, WIDE).keys() | calls(kind, CLOSE).keys() >= CONCURRENT_ONLY | {SEVERAL}


@pytest.mark.parametrize("point", TOGETHER)
def test_a_fault_at_a_concurrent_point_ends_no_other_request(point: str) -> None:
    chance = random.Random(point)
    kinds = chance.sample(FEW_KINDS, len(FEW_KINDS))
    kind, setup = next((kind, setup) for kind in kinds for setup in SETUPS if calls(kind, setup)[point])
    serve_concurrently(kind, setup, Injector(any_plan(point, kind, setup, chance)))


def test_a_half_finished_join_is_discarded() -> None:
    """The batch of both requests exists, but neither of them refers to it yet."""
    for at in range(2):
        serve_concurrently("llama", WIDE, Injector(Plan("join rows", at, late=True)))


def test_requests_that_leave_a_batch_are_logged_once() -> None:
    for at in range(0, calls("llama", WIDE)["part"], 3):
        serve_concurrently("llama", WIDE, Injector(Plan("part", at)))


def test_a_fault_after_absorbing_a_token_does_not_feed_it_to_the_layers_twice() -> None:
    """The layers have caught up with the batch when the next call raises."""
    for at in range(calls("qwen3_next", WIDE)["absorb"]):
        serve_concurrently("qwen3_next", WIDE, Injector(Plan("absorb", at, late=True)))


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_fault_of_one_concurrent_request_ends_no_other_request(kind: str) -> None:
    chance = random.Random(kind)
    for point in chance.sample(sorted(ALONE - set(FATAL)), 5):
        setup = next((setup for setup in SETUPS if calls(kind, setup)[point]), None)
        if setup is not None:
            serve_concurrently(kind, setup, Injector(any_plan(point, kind, setup, chance)))


@pytest.mark.parametrize(
    "point", ["return to prefill", "read", "forward", "release layers", "end session", "part layers"]
)
def test_a_fault_while_a_failed_batch_is_split_ends_one_request(point: str) -> None:
    """The first call at the point after a forward of several rows has failed raises too."""
    serve_concurrently("gemma3", WIDE, Injector(Plan(SEVERAL, 9), Plan(point, 0)))


@pytest.mark.parametrize("point", ["sample together", "forward", "unlock", "reset"])
def test_a_fault_that_lasts_for_a_wave_does_not_affect_the_next(point: str) -> None:
    """Requests of the wave may fail; later requests must not notice."""
    chance = random.Random(point)
    kind = chance.choice(FEW_KINDS)
    serve_concurrently(kind, WIDE, Injector(any_plan(point, kind, WIDE, chance)._replace(lasting=True)))


@pytest.mark.parametrize("point", ["begin", "end session"])
def test_a_dropped_cache_is_freed_at_once_while_other_requests_continue(point: str) -> None:
    wave = concurrent_waves("gemma3")[0]
    for planned in wave:
        expected("gemma3", tuple(planned.prompt), planned.say)
    with close_checkpoints():
        driven = DrivenEngine("gemma3", "trie")
        before = active_bytes()
        gc.disable()
        try:
            with watching(Injector(Plan(point, 1, late=True)), point):
                outcomes = driven.serve(wave)
            assert sum(isinstance(outcome.end, Failed) for outcome in outcomes) == (point == "begin")
            driven.clear()
            assert held_bytes() == before
        finally:
            gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=["wide", "close"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_anywhere_among_concurrent_requests_ends_no_other_request(kind: str, setup: Setup) -> None:
    for point in sorted(calls(kind, setup).keys() - set(FATAL)):
        for number in range(3):
            serve_concurrently(
                kind, setup, Injector(any_plan(point, kind, setup, random.Random(f"{point} {kind} {number}")))
            )
