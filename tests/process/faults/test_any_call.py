"""A fault in any call below the engine ends its request with one error; all later answers are right.

A sequence of ten requests is served again and again, each time with a fault: in the k-th call at a point, before or
after the call does its work, once or for the rest of the request. A run without faults counts the calls first. A point
that is never reached fails the test, so no test passes because its fault was never raised.
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
from scripts.tools.conformance.fault_points import (
    CONCURRENT_ONLY,
    DRAFTED_ONLY,
    FATAL,
    FAULTS,
    HARMLESS,
    POINTS,
    TRIE_ONLY,
    watching,
)
from scripts.tools.host.lib import OUT_OF_MEMORY
from scripts.tools.models.tiny import KINDS
from tests.lib.memory import held_bytes
from tests.process.faults.driven_engine import DrivenEngine, active_bytes, close_checkpoints, last_layer
from tests.process.faults.workloads import Wave, expected, sequence

pytestmark = pytest.mark.usefixtures("quiet")
LAYER, SEVERAL = "last layer", "last layer of several"
ALL = (*POINTS, LAYER)
"""Points at which a fault may be raised."""
Setup = tuple[str, float]
"""A cache and, for the trie, its budget as a share of the bytes that it would hold without a budget."""
ROOMY, TIGHT, SINGLE, NONE = ("trie", 0.5), ("trie", 0.15), ("single", 0.0), ("none", 0.0)
"""With half of the bytes, conversations are evicted; with 15 %, one conversation alone is too large."""
SETUPS: tuple[Setup, ...] = (ROOMY, TIGHT, SINGLE, NONE)
FEW_KINDS = ("llama", "gemma3", "qwen3_next")
STATES_ONLY = ("mamba2", "deepseek_v41")
"""Kinds whose layers are states of constant size: no conversation is too large, and few positions can be rewound to."""
AFTER_A_FAULT = frozenset({"drop", "return to prefill"})
"""Points that are reached only after a fault."""
ALONE = frozenset(ALL) - CONCURRENT_ONLY - DRAFTED_ONLY - AFTER_A_FAULT
"""Points that one request at a time reaches without drafts."""
NEVER: dict[Setup, frozenset[str]] = {
    SINGLE: TRIE_ONLY - {"page out layers"},
    NONE: TRIE_ONLY - {"page out layers"} | {"rewind layers", "evaluate layers"},
}


class Plan(NamedTuple):
    """A fault in call number `at` of `point`, counted from 0, and with `lasting` in all later ones of the same request.
    It is raised before the call or, with `late`, after it."""

    point: str
    at: int
    fault: str = "fault"
    late: bool = False
    lasting: bool = False


class Injector:
    """Counts calls and raises the planned faults."""

    def __init__(self, *plans: Plan) -> None:
        """Takes plans in order; each counts calls from where the one before was raised."""
        self.calls: Counter[str] = Counter()
        self.raised = 0
        self.request = 0
        self.watched: Collection[str] = {plan.point for plan in plans} & POINTS.keys() if plans else POINTS.keys()
        self.faults = {plan.fault for plan in plans}
        self.concerns_one = not plans or any(plan.point not in HARMLESS for plan in plans)
        """True if a fault may end a request."""
        self.waiting = list(plans)
        self._lasting: tuple[Plan, int] | None = None

    def __call__(self, name: str) -> BaseException | None:
        at = self.calls[name]
        self.calls[name] += 1
        plan = self._due(name, at)
        if plan is None:
            return None
        self.raised += 1
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
        """Returns a context that is entered around each wave."""
        return nullcontext()

    def layer(self, rows: int) -> None:
        """Raises a planned fault where a forward reaches its last layer."""
        for name in (LAYER, SEVERAL)[:rows]:
            late = self(name)
            if late is not None:
                raise late


def serve(
    kind: str, setup: Setup, injector: Injector, waves: Sequence[Wave] = (), *, drafted: bool = False
) -> DrivenEngine:
    """Serves a workload with the injector's faults: these waves, or the sequence with two of its requests repeated.

    Checks that every fault ends at most one request and that all other answers are right.
    """
    waves = waves or [[planned] for planned in (*sequence(kind), *sequence(kind)[1:3])]
    for planned in (planned for wave in waves for planned in wave):
        expected(kind, tuple(planned.prompt), planned.say)  # before anything breaks
    cache, share = setup
    budget = round(unbounded_bytes(kind) * share) if share else None
    before = active_bytes()
    with close_checkpoints(), watching(injector, *injector.watched), last_layer(kind, injector.layer):
        driven = DrivenEngine(kind, cache, budget, drafted=drafted)
        for injector.request, wave in enumerate(waves):
            raised = injector.raised
            with injector.around():
                outcomes = driven.serve(wave)
            failed = [outcome.end for outcome in outcomes if isinstance(outcome.end, Failed)]
            assert len(failed) <= (injector.raised - raised if injector.concerns_one else 0)
            for end in failed:
                check_text(end.text, injector.faults)
            for planned, outcome in zip(wave, outcomes, strict=True):
                assert outcome.end is not None or planned.leave_after is not None
                driven.check(planned, outcome)
    driven.clear()
    assert active_bytes() - before == 0
    assert not injector.waiting, "a planned fault was never raised"
    return driven


def check_text(text: str, faults: Set[str]) -> None:
    """Checks that the text speaks of memory if and only if memory ran out."""
    assert faults != {"fault"} or not any(phrase in text.lower() for phrase in OUT_OF_MEMORY)
    assert "fault" in faults or text.startswith("out of memory: ")


@cache
def unbounded_bytes(kind: str) -> int:
    """Returns the bytes that the trie holds after the sequence without a budget."""
    with close_checkpoints():
        driven = DrivenEngine(kind, "trie")
        for planned in sequence(kind):
            driven.serve_one(planned)
    return driven.cache.nbytes


@cache
def calls(kind: str, setup: Setup) -> Counter[str]:
    """Returns how often the sequence without a fault reaches each point."""
    injector = Injector()
    driven = serve(kind, setup, injector)
    assert driven.compared >= 30
    return injector.calls


def any_plan(point: str, kind: str, setup: Setup, chance: random.Random) -> Plan:
    """Plans a fault in a random call at this point of the sequence."""
    return Plan(
        point,
        chance.randrange(calls(kind, setup)[point]),
        chance.choice(("fault", "python memory", "mlx memory")),
        late=chance.random() < 0.4,
        lasting=chance.random() < 0.3,
    )


def check_reached(kind: str) -> None:
    """Checks that the sequence reaches every point that exists for such layers."""
    never = {"trim", "truncate"} if kind in STATES_ONLY else set()
    assert calls(kind, ROOMY).keys() | calls(kind, TIGHT).keys() == ALONE - never
    rewound = {"rewind"} if kind in STATES_ONLY else set()
    assert calls(kind, SINGLE).keys() == ALONE - NEVER[SINGLE]
    assert calls(kind, NONE).keys() == ALONE - NEVER[NONE] - rewound


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_the_sequence_reaches_every_point(kind: str) -> None:
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
def test_every_fourth_call_of_the_sequence_may_fail() -> None:
    """The offset differs from point to point."""
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
def test_a_fault_during_recovery_ends_no_other_request(point: str, lasting: bool) -> None:
    """After a sample has failed, the first call at the point fails too, or all of them until the request ends."""
    serve("gemma3", ROOMY, Injector(Plan("sample", 9), Plan(point, 0, lasting=lasting)))


@pytest.mark.parametrize("point", sorted(set(FATAL) - CONCURRENT_ONLY))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_engine_is_raised_out_of_it(point: str, fault: str) -> None:
    """It ends the process with its text, as `tests/process/faults/test_fatal.py` shows."""
    with pytest.raises(type(FAULTS[fault]())):
        serve("llama", ROOMY, Injector(Plan(point, 3, fault)))


@pytest.mark.parametrize("point", ["sample", "begin", "keep", "evaluate"])
def test_system_exit_is_raised_out_of_the_engine(point: str) -> None:
    with pytest.raises(SystemExit):
        serve("llama", ROOMY, Injector(Plan(point, 3, "exit")))


class InForward(Injector):
    """Counts only calls that the cache itself makes around a forward."""

    def __call__(self, name: str) -> BaseException | None:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code is inspect.unwrap(LiveSession.forward).__code__:
                return super().__call__(name)
        return None


@pytest.mark.parametrize("at", range(20))
def test_a_half_copied_snapshot_is_discarded(at: int) -> None:
    """The snapshot has left the layer's buffers and has no bytes of its own yet. Covers all such calls."""
    serve("llama", ROOMY, InForward(Plan("release bytes", at, late=True)))


def test_a_session_whose_request_failed_to_start_is_closed() -> None:
    for late in (False, True):
        serve("llama", ROOMY, Injector(Plan("plan", 2, late=late)))


@pytest.mark.parametrize("point", ["begin", "keep"])
def test_a_dropped_cache_is_freed_at_once(point: str) -> None:
    requests = sequence("gemma3")[:4]
    expected("gemma3", tuple(requests[3].prompt))  # before anything is counted
    with close_checkpoints():
        driven = DrivenEngine("gemma3", "trie")
        before = active_bytes()
        gc.disable()
        try:
            with watching(Injector(Plan(point, 3, late=True)), point):
                for planned in requests:
                    outcome = driven.serve_one(planned)
            driven.check(requests[3], outcome)
            assert driven.cache.nbytes == 0
            assert held_bytes() == before
        finally:
            gc.enable()
