"""A fault in any call below the engine ends at most one request; all other answers are right, and nothing leaks.

A story of requests is told again and again, each time with a fault: in the k-th call at a point, before or after the
call does its work, once or from then on. A story without faults counts the calls first. A point that is never reached
fails the test, so no test passes because its fault was never raised.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.cache.checkpoints import CheckpointPolicy
from runner.cache.session import Session
from runner.cache.trie_cache import TrieCache
from runner.drafts.draft_policy import Draft, DraftPolicy, Terms
from runner.drafts.drafting import AnswerDrafter, Drafting
from runner.engine.events import Failed
from runner.engine.generation import Forward
from runner.engine.policy import SlicePolicy
from runner.sampling import SamplingOptions
from scripts.tools.host.lib import OUT_OF_MEMORY
from scripts.tools.models.tiny import VOCAB, words
from tests.lib.memory import held_bytes
from tests.lib.tiny_engine import ClientRequest, RequestSpec, TinyEngine, oracle_answer
from tests.process.faults.fault_points import FATAL, FAULTS, HARMLESS, POINTS, watching

pytestmark = pytest.mark.usefixtures("quiet")
KIND = "gemma3"
"""Some of its layers keep a window and can be rewound by little; the others keep all tokens."""
LAYER, SEVERAL = "last layer", "last layer of several"
ALL = (*POINTS, LAYER, SEVERAL)
"""Points at which a fault may be raised."""
AFTER_A_FAULT = frozenset({"drop", "return to prefill"})
"""Points that are reached only after a fault."""
NEVER_LATE = frozenset({"join"})
"""Calls whose last line hands everything over: a fault after it has nothing left to break."""
SETUPS = {
    "wide": ("trie", 2.0),
    "roomy": ("trie", 0.5),
    "tight": ("trie", 0.1),
    "single": ("single", 0.0),
    "none": ("none", 0.0),
}
"""A cache and, for the trie, its budget as a share of the bytes that one request at a time leaves without one: with
twice as many, several run together; with half of them, conversations are evicted; with a tenth,
one alone is too large."""
_CHUNK = 24
_RIGHT = 2
"""Right tokens of a draft, before a wrong one."""


class Plan(NamedTuple):
    """A fault in call number `at` of `point`, counted from 0, and with `lasting` in all later ones of the same wave.
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
        self.wave = 0
        self.watched: Collection[str] = {plan.point for plan in plans} & POINTS.keys() if plans else POINTS.keys()
        self.faults = {plan.fault for plan in plans}
        self.layered = any(plan.point in (LAYER, SEVERAL) for plan in plans)
        """True if a fault is the one of `CountedForward`."""
        self.concerns_one = any(plan.point not in HARMLESS for plan in plans)
        """True if a fault may end a request."""
        self.waiting = list(plans)
        self._lasting: tuple[Plan, int] | None = None

    def __call__(self, name: str) -> BaseException | None:
        plan = self._due(name)
        if plan is None:
            return None
        fault = FAULTS[plan.fault]()
        if plan.late:
            return fault
        raise fault

    def _due(self, name: str) -> Plan | None:
        at = self.calls[name]
        self.calls[name] += 1
        plan = None
        if self._lasting is not None and (name, self.wave) == (self._lasting[0].point, self._lasting[1]):
            plan = self._lasting[0]
        elif self.waiting and (name, at) == self.waiting[0][:2]:
            plan = self.waiting.pop(0)
            self.calls.clear()
            self._lasting = (plan, self.wave) if plan.lasting else None
        self.raised += plan is not None
        return plan

    def breaks(self, rows: int, length: int) -> bool:
        """Returns True if a forward is to raise in its last layer."""
        return [self._due(name) for name in (LAYER, SEVERAL)[:rows]] not in ([None], [None, None])

    def watch(self, forward: Forward) -> Forward:
        """Returns the forward with its point before it."""

        def watched(tokens: mx.array, layers: list[object]) -> mx.array:
            late = self("forward")
            logits = forward(tokens, layers)
            if late is not None:
                raise late
            return logits

        return watched


class Asked(NamedTuple):
    """A request, and the number of slices after which its client leaves."""

    spec: RequestSpec
    leave_after: int | None = None


def asked(prompt: Sequence[int], say: int = 8, leave_after: int | None = None, **options: int) -> Asked:
    return Asked(RequestSpec(tuple(prompt), say, SamplingOptions(**options)), leave_after)  # type: ignore[arg-type]


@cache
def waves(kind: str) -> list[list[Asked]]:
    """Requests one at a time: a conversation goes on, branches and is edited; a client leaves during prefill and asks
    again; an answer is regenerated; a prompt exceeds the budget. Then several that arrive shortly after each other: two
    share a prefix, a third joins, there are more than places, and clients leave a batch and the queue."""
    first, other, third = words(50), words(60, 5), words(33, 3)
    said = oracle_answer(kind, asked(first).spec).tokens
    second = [*first, *said, 1, *words(20, 2)]
    edited = [*second[:30], (second[30] + 5) % VOCAB, *second[31:]]
    alone = [
        *(asked(first), asked(second), asked([*first[:22], 2, *words(25, 3)]), asked(edited)),
        *(asked(other, leave_after=2), asked(other), asked(second, logprobs=True, top_logprobs=2)),
        *(asked(words(150, 7), 4), asked(first)),
    ]
    together = [
        asked(words(90), 14),
        asked([*words(90)[:84], 2, *words(9, 3)], 9, logprobs=True, top_logprobs=2),
        asked(third, 14, leave_after=24),
        asked(words(9, 9), 4, leave_after=0),
    ]
    found = [*([each] for each in alone), together, together[:2]]
    for each in (each for wave in found for each in wave):
        oracle_answer(kind, each.spec)  # before anything breaks
    return found


class SweptDrafter(AnswerDrafter):
    """Drafts at every step: from known text as ever, else two right tokens and a wrong one."""

    def __init__(self, shared: Drafting, prompt: Sequence[int], answer: list[int]) -> None:
        super().__init__(shared, prompt)
        self._start, self._answer = len(prompt), answer

    def find(self, session: Session, most: int) -> Draft | None:
        at = len(session.recorded) - self._start
        coming = self._answer[at : at + _RIGHT + 1]
        drafts = [*coming[:_RIGHT], *((token + 1) % VOCAB for token in coming[_RIGHT:])][:most]
        return super().find(session, most) or (Draft(drafts, "own", _RIGHT) if drafts else None)


class _Willing(DraftPolicy):
    """Takes all of every draft, of two answers at most: more of them make steps without drafts."""

    def lengths(self, drafts: Sequence[Draft], terms: Terms) -> Sequence[int]:
        super().lengths(drafts, terms)  # it learns from drafts that it was asked about
        return [max(len(draft.tokens) for draft in drafts) if terms.together <= 2 else 0] * len(drafts)


def draft_always(kind: str) -> Drafting:
    """Returns what lets an engine draft at every step, from the first one on."""
    drafting = Drafting(_Willing(7))
    drafting.speed(1).record = lambda *_, **__: None  # type: ignore[method-assign]  # however slow
    answers = {each.spec.prompt: oracle_answer(kind, each.spec).tokens for wave in waves(kind) for each in wave}
    drafting.drafter = lambda prompt: SweptDrafter(drafting, prompt, answers[tuple(prompt)])  # type: ignore[method-assign]
    return drafting


@contextmanager
def close_checkpoints() -> Iterator[None]:
    """Spaces checkpoints for prompts of a hundred tokens instead of thousands."""
    checkpoints = partial(CheckpointPolicy, gap=3, first_distance=16)
    with patch("runner.cache.checkpoints.CheckpointPolicy", lambda _: checkpoints(frozenset({1, 2}))):
        yield


def serve(engine: TinyEngine, wave: list[Asked]) -> list[ClientRequest]:
    """Serves requests that arrive a slice apart."""
    waiting, running = list(wave), list[tuple[ClientRequest, int]]()
    while waiting or not engine.idle:
        if waiting:
            each = waiting.pop(0)
            leave = MOST_SLICES if each.leave_after is None else each.leave_after
            running.append((engine.submit(each.spec), engine.slices + leave))
        with patch("runner.engine.batch.monotonic", engine.clock):  # how long a round took: it decides the next one
            engine.advance()
        for request, leave in running:
            if engine.slices > leave:
                request.request.cancel()
        assert engine.slices < MOST_SLICES, "a request never ended"
    return [request for request, _ in running]


MOST_SLICES = 5000


def tell(setup: str, injector: Injector, kind: str = KIND) -> TinyEngine:
    """Tells the story with the injector's faults.

    Checks that every fault ends at most one request, that all other answers are right and the cache is in order.
    """
    story, (cache_kind, share) = waves(kind), SETUPS[setup]
    budget = round(unbounded_bytes(kind) * share) if share else None
    before = held_bytes()
    with close_checkpoints(), watching(injector, *injector.watched):
        engine = TinyEngine(
            kind,
            SlicePolicy(_CHUNK, 0.1),
            parallel=3,
            cache=cache_kind,
            budget=budget,
            watch=injector.watch,
            drafting=draft_always(kind),
        )
        engine.scheduler.memory.allows_drafts = lambda cache: True  # type: ignore[method-assign]
        engine.forward.breaks = injector.breaks
        ended = []
        for injector.wave, wave in enumerate(story):
            raised = injector.raised
            requests = serve(engine, wave)
            failed = [request.received[-1] for request in requests if request.failed]
            assert len(failed) <= (injector.raised - raised if injector.concerns_one else 0)
            ended += failed
    for end in ended:
        assert isinstance(end, Failed)
        check_text(end.text, injector)
    engine.check()
    check_freed(engine, before)
    assert not injector.waiting, "a planned fault was never raised"
    return engine


def check_text(text: str, injector: Injector) -> None:
    """Checks that the text speaks of memory if and only if memory ran out."""
    assert injector.faults != {"fault"} or not any(phrase in text.lower() for phrase in OUT_OF_MEMORY)
    assert "fault" in injector.faults or injector.layered or text.startswith("out of memory: ")


def check_freed(engine: TinyEngine, before: int) -> None:
    """Checks that no request locks anything, and that an empty cache holds nothing and leaves nothing behind."""
    cache = engine.scheduler.cache
    if isinstance(cache, TrieCache):
        parked = Counter(end.path()[0] for end in cache.sequences.parked.values())
        assert all(root.locks == parked[root] for root in cache.trie.roots.values())
    cache.detach()
    assert cache.nbytes == 0
    for request in engine.requests:
        request.session = None
    assert held_bytes() <= before


@cache
def unbounded_bytes(kind: str) -> int:
    """Returns the bytes that the trie holds after the requests one at a time without a budget."""
    with close_checkpoints():
        engine = TinyEngine(kind, SlicePolicy(_CHUNK, 0.1))
        for wave in waves(kind)[:-2]:
            serve(engine, wave)
    return engine.scheduler.cache.nbytes


@cache
def calls(setup: str, kind: str = KIND) -> Counter[str]:
    """Returns how often the story without a fault reaches each point."""
    injector = Injector()
    engine = tell(setup, injector, kind)
    assert sum(len(request.text) for request in engine.requests) > 60
    return injector.calls


def any_plan(point: str) -> tuple[str, Plan]:
    """Plans a fault in a random call at this point, with a random one of the caches that reach it."""
    chance = random.Random(f"{point} {KIND}")
    setup = next(setup for setup in chance.sample([*SETUPS], len(SETUPS)) if calls(setup)[point])
    fault = chance.choice(("fault", "python memory", "mlx memory"))
    late = chance.random() < 0.4 and point not in NEVER_LATE
    return setup, Plan(point, chance.randrange(calls(setup)[point]), fault, late, lasting=chance.random() < 0.2)


def test_the_story_reaches_every_point() -> None:
    assert set().union(*(calls(setup) for setup in SETUPS)) == {*ALL} - AFTER_A_FAULT


@pytest.mark.parametrize("point", sorted({*ALL} - AFTER_A_FAULT - set(FATAL)))
def test_a_fault_anywhere_ends_one_request(point: str) -> None:
    setup, plan = any_plan(point)
    tell(setup, Injector(plan))


@pytest.mark.parametrize(
    "plans",
    [
        *((Plan("sample", 9), Plan(point, 0)) for point in ("unlock", "close session", "end session", "drop")),
        *((Plan("sample", 9), Plan(point, 0, lasting=True)) for point in ("reset", "evict", "close snapshot")),
        *((Plan(SEVERAL, 5), Plan(point, 0)) for point in ("return to prefill", "read", "release layers")),
        (Plan("join rows", 0, late=True),),  # the batch of both exists, but neither of them refers to it yet
        (Plan("absorb", 0, late=True),),  # the layers have caught up with the batch: no token is fed to them twice
        *((Plan("release bytes", at, late=True),) for at in (0, 7)),  # a snapshot is half copied
    ],
    ids=lambda plans: " and ".join(f"{plan.point} {plan.at}" for plan in plans),
)
def test_a_fault_while_another_one_is_mended_ends_no_other_request(plans: tuple[Plan, ...]) -> None:
    tell("wide", Injector(*plans))


@pytest.mark.parametrize("point", ["sample", "keep"])
def test_system_exit_is_raised_out_of_the_engine(point: str) -> None:
    with pytest.raises(SystemExit):
        tell("wide", Injector(Plan(point, 3, "exit")))
