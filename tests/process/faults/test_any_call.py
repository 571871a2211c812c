"""Whatever call breaks below the engine, in whatever request: that one ends with one error, and the next are right.

A day of ten requests is served again and again, each time with a fault: at a point, in its k-th call, before or after
the call does its work, once or as long as the request lasts. What a day without a fault comes to is counted first: a
point that it never comes to fails, so nothing here passes for not having been there.
"""

import gc
import inspect
import random
import sys
from collections import Counter
from collections.abc import Collection, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import pytest

from runner.cache.session import LiveSession
from runner.engine.events import Failed
from scripts.tools.conformance.fault_points import COMPANY_ONLY, FATAL, FAULTS, NOBODYS, POINTS, TRIE_ONLY, watching
from scripts.tools.host.lib import OUT_OF_MEMORY
from scripts.tools.models.tiny import KINDS
from tests.lib.memory import held_bytes
from tests.process.faults.bench import Bench, active_bytes, close_restore_points, last_layer
from tests.process.faults.days import Wave, day, expected

pytestmark = pytest.mark.usefixtures("quiet")
LAYER, SEVERAL = "last layer", "last layer of several"
ALL = (*POINTS, LAYER)
"""What breaks."""
Setup = tuple[str, float]
"""A cache and, for the trie, its budget as a share of what it would hold without one."""
ROOMY, TIGHT, SINGLE, NONE = ("trie", 0.5), ("trie", 0.15), ("single", 0.0), ("none", 0.0)
"""With half of the bytes conversations go; with little, a conversation alone is too large."""
SETUPS: tuple[Setup, ...] = (ROOMY, TIGHT, SINGLE, NONE)
FEW_KINDS = ("llama", "gemma3", "qwen3_next")
STATES_ONLY = ("mamba2", "deepseek_v41")
"""Kinds whose layers are states of one size: a conversation is never too large, and only few things can be rewound."""
AFTER_A_FAULT = frozenset({"drop", "return to prefill"})
"""What only a fault leads to."""
ALONE = frozenset(ALL) - COMPANY_ONLY - AFTER_A_FAULT
"""What one request at a time comes to."""
NEVER: dict[Setup, frozenset[str]] = {
    SINGLE: TRIE_ONLY - {"page out layers"},
    NONE: TRIE_ONLY - {"page out layers"} | {"rewind layers", "evaluate layers"},
}


class Plan(NamedTuple):
    """What goes wrong: the call number `at` of `point`, from 0 on, and with `lasting` all that follow it in the same
    request; before the call or, with `late`, after it."""

    point: str
    at: int
    fault: str = "fault"
    late: bool = False
    lasting: bool = False


class Injector:
    """Counts the calls, and breaks those that are planned."""

    def __init__(self, *plans: Plan) -> None:
        """Of several plans each counts from where the one before has struck."""
        self.calls: Counter[str] = Counter()
        self.struck = 0
        self.request = 0
        self.watched: Collection[str] = {plan.point for plan in plans} & POINTS.keys() if plans else POINTS.keys()
        self.faults = {plan.fault for plan in plans}
        self.concerns_one = not plans or any(plan.point not in NOBODYS for plan in plans)
        """Whether a request may end by it."""
        self.waiting = list(plans)
        self._lasting: tuple[Plan, int] | None = None

    def __call__(self, name: str) -> BaseException | None:
        at = self.calls[name]
        self.calls[name] += 1
        plan = self._due(name, at)
        if plan is None:
            return None
        self.struck += 1
        fault = FAULTS[plan.fault]()
        if plan.late:
            return fault
        raise fault

    def _due(self, name: str, at: int) -> Plan | None:
        if self._lasting is not None and (name, self.request) == (self._lasting[0].point, self._lasting[1]):
            return self._lasting[0]
        if not self.waiting or (name, at) != self.waiting[0][:2]:
            return None
        plan = self.waiting.pop(0)
        self.calls.clear()
        self._lasting = (plan, self.request) if plan.lasting else None
        return plan

    def around(self) -> AbstractContextManager[None]:
        """For each request."""
        return nullcontext()

    def layer(self, rows: int) -> None:
        """The last layer is reached, which nothing has done its work before."""
        for name in (LAYER, SEVERAL)[:rows]:
            late = self(name)
            if late is not None:
                raise late


def serve(kind: str, setup: Setup, injector: Injector, waves: Sequence[Wave] = ()) -> Bench:
    """A day with whatever the injector does in it: these waves, or requests one by one, two of them again at last.

    Every fault ends one request at most, and those that it does not concern are answered rightly.
    """
    waves = waves or [[ask] for ask in (*day(kind), *day(kind)[1:3])]
    for ask in (ask for wave in waves for ask in wave):
        expected(kind, tuple(ask.prompt), ask.say)  # before anything breaks
    cache, share = setup
    budget = round(most_bytes(kind) * share) if share else None
    before = active_bytes()
    with close_restore_points(), watching(injector, *injector.watched), last_layer(kind, injector.layer):
        bench = Bench(kind, cache, budget)
        for injector.request, wave in enumerate(waves):
            struck = injector.struck
            with injector.around():
                outcomes = bench.serve(wave)
            failed = [outcome.end for outcome in outcomes if isinstance(outcome.end, Failed)]
            assert len(failed) <= (injector.struck - struck if injector.concerns_one else 0)
            for end in failed:
                check_text(end.text, injector.faults)
            for ask, outcome in zip(wave, outcomes, strict=True):
                assert outcome.end is not None or ask.leave_after is not None
                bench.check(ask, outcome)
    bench.clear()
    assert active_bytes() - before == 0
    assert not injector.waiting, "a fault was never come to"
    return bench


def check_text(text: str, faults: Set[str]) -> None:
    """Memory is named if and only if it ran out."""
    assert faults != {"fault"} or not any(phrase in text.lower() for phrase in OUT_OF_MEMORY)
    assert "fault" in faults or text.startswith("out of memory: ")


@cache
def most_bytes(kind: str) -> int:
    """What the trie holds at the end of a day without a budget."""
    with close_restore_points():
        bench = Bench(kind, "trie")
        for ask in day(kind):
            bench.ask(ask)
    return bench.cache.nbytes


@cache
def calls(kind: str, setup: Setup) -> Counter[str]:
    """How often a day without a fault comes to each point."""
    injector = Injector()
    bench = serve(kind, setup, injector)
    assert bench.compared >= 30
    return injector.calls


def any_plan(point: str, kind: str, setup: Setup, chance: random.Random) -> Plan:
    """A call of that point in such a day."""
    return Plan(
        point,
        chance.randrange(calls(kind, setup)[point]),
        chance.choice(("fault", "python memory", "mlx memory")),
        late=chance.random() < 0.4,
        lasting=chance.random() < 0.3,
    )


def check_reached(kind: str) -> None:
    """A day comes to every point that there is for such layers."""
    never = {"trim", "truncate"} if kind in STATES_ONLY else set()
    assert calls(kind, ROOMY).keys() | calls(kind, TIGHT).keys() == ALONE - never
    rewound = {"rewind"} if kind in STATES_ONLY else set()
    assert calls(kind, SINGLE).keys() == ALONE - NEVER[SINGLE]
    assert calls(kind, NONE).keys() == ALONE - NEVER[NONE] - rewound


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_day_comes_to_every_point(kind: str) -> None:
    check_reached(kind)


@pytest.mark.parametrize("point", sorted(ALONE - set(FATAL)))
def test_a_fault_anywhere_ends_one_request(point: str) -> None:
    chance = random.Random(point)
    kinds = chance.sample(FEW_KINDS, len(FEW_KINDS))
    kind, setup = next((kind, setup) for kind in kinds for setup in (ROOMY, TIGHT) if calls(kind, setup)[point])
    serve(kind, setup, Injector(any_plan(point, kind, setup, chance)))


@pytest.mark.parametrize("setup", [SINGLE, NONE], ids=["single", "none"])
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_fault_in_a_smaller_cache_ends_one_request(kind: str, setup: Setup) -> None:
    chance = random.Random(kind)
    points = sorted(calls(kind, setup).keys() - set(FATAL))
    for point in chance.sample(points, 2):
        serve(kind, setup, Injector(any_plan(point, kind, setup, chance)))


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=["roomy", "tight", "single", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_anywhere_with_any_layers_ends_one_request(kind: str, setup: Setup) -> None:
    check_reached(kind)
    for point in calls(kind, setup).keys() - set(FATAL):
        serve(kind, setup, Injector(any_plan(point, kind, setup, random.Random(f"{point} {kind}"))))


@pytest.mark.slow
def test_every_fourth_call_in_a_day_may_fail() -> None:
    """Another fourth for each point."""
    for point, count in calls("qwen3_next", TIGHT).items():
        first = random.Random(point).randrange(4)
        for at in range(first, count if point not in FATAL else 0, 4):
            serve("qwen3_next", TIGHT, Injector(Plan(point, at)))


@pytest.mark.parametrize(
    ("point", "lasting"),
    [
        *(("drop", False), ("unlock", False), ("reset", False), ("close session", False), ("end session", False)),
        *(("drop", True), ("reset", True), ("evict", True), ("close snapshot", True)),
    ],
)
def test_a_fault_while_one_is_dealt_with_ends_no_other_request(point: str, lasting: bool) -> None:
    """The first call of the point after a sample has failed, or all of them until the request is over."""
    serve("gemma3", ROOMY, Injector(Plan("sample", 9), Plan(point, 0, lasting=lasting)))


@pytest.mark.parametrize("point", sorted(set(FATAL) - COMPANY_ONLY))
@pytest.mark.parametrize("fault", FAULTS)
def test_what_breaks_the_engine_comes_out_of_it(point: str, fault: str) -> None:
    """And ends the process, with its text: `tests/process/faults/test_end.py`."""
    with pytest.raises(type(FAULTS[fault]())):
        serve("llama", ROOMY, Injector(Plan(point, 3, fault)))


@pytest.mark.parametrize("point", ["sample", "begin", "keep", "evaluate"])
def test_what_is_no_error_of_a_request_comes_out_of_the_engine(point: str) -> None:
    with pytest.raises(SystemExit):
        serve("llama", ROOMY, Injector(Plan(point, 3, "exit")))


class InForward(Injector):
    """Counts only the calls in which the cache itself makes ready for a forward, or follows it."""

    def __call__(self, name: str) -> BaseException | None:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code is inspect.unwrap(LiveSession.forward).__code__:
                return super().__call__(name)
        return None


@pytest.mark.parametrize("at", range(20))
def test_what_is_half_copied_when_a_forward_begins_is_not_met_again(at: int) -> None:
    """A snapshot has left the layer's buffers, and has no bytes of its own yet. These are all such calls of the day."""
    serve("llama", ROOMY, InForward(Plan("release bytes", at, late=True)))


def test_a_session_that_was_opened_for_nobody_is_not_left_open() -> None:
    for late in (False, True):
        serve("llama", ROOMY, Injector(Plan("plan", 2, late=late)))


@pytest.mark.parametrize("point", ["begin", "keep"])
def test_what_a_dropped_cache_held_is_free_at_once(point: str) -> None:
    asks = day("gemma3")[:4]
    expected("gemma3", tuple(asks[3].prompt))  # before anything is counted
    with close_restore_points():
        bench = Bench("gemma3", "trie")
        before = active_bytes()
        gc.disable()
        try:
            with watching(Injector(Plan(point, 3, late=True)), point):
                for ask in asks:
                    outcome = bench.ask(ask)
            bench.check(asks[3], outcome)
            assert bench.cache.nbytes == 0
            assert held_bytes() == before
        finally:
            gc.enable()
