"""Real layer caches of every kind, with up to three sessions open at once, alone or in a batch (scenario 84).

The tokens are given, so that the logits of every step can be compared with a run without a cache, whatever came before.
Whatever happens to conversations, the cache answers as no cache does (scenarios 44 and 76). Hypothesis invents users:
they go on, go back, change what was said, decode together, leave in the middle; forwards break; memory is short.

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar, cast

import mlx.core as mx
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runner.cache.checkpoints import TurnCheckpoints
from runner.cache.decode_rows import DecodeRows
from runner.cache.trie_cache import TrieCache
from runner.cache.trie_session import TrieSession
from scripts.tools.models.tiny import KINDS, VOCAB, Tiny, tiny, words
from tests.lib.driver import check_trie, largest
from tests.lib.machines import limits

BATCHABLE = ("llama", "gemma3", "mamba2", "qwen3_next", "falcon_h1", "deepseek_v3", "deepseek_v32")
MAX_PROMPT = 90
TURNS = frozenset({1, 2})


class Row:
    """A session, the rows it is in, and the logits [VOCAB] after each of its forwards that ended with a given token."""

    def __init__(self, model: Tiny, session: TrieSession) -> None:
        self.model = model
        self.session = session
        self.rows = DecodeRows(session)
        self.logits: dict[int, mx.array] = {}

    @property
    def decodes(self) -> bool:
        """True if the whole prompt is read."""
        return self.session.position >= self.session.total

    def read(self, most: int) -> bool:
        """A slice of the prompt; without one, its last token. Whether there was anything to read."""
        count = self.session.next_forward(most) or len(self.session.recorded) - self.session.position
        if not count:
            return False
        at = self.session.position
        with self.session.forward(count):
            logits = self.model.model(mx.array([self.session.recorded[at : at + count]]), cache=self.session.layers)
        self.logits[at + count] = logits[0, -1]
        mx.eval(self.session.state())
        return True

    def read_all(self) -> None:
        while not self.decodes:
            self.read(16)

    def leave(self, settle: bool = True) -> None:
        """Out of the batch; who stays alone takes its own along."""
        rows = self.rows
        if len(rows.sessions) == 1:
            return
        place = rows.sessions.index(self.session)
        stay = [row for row in range(len(rows.sessions)) if row != place]
        if settle:
            rows.settle(place)
        if len(stay) == 1:
            rows.settle(stay[0])
        rows.keep(stay)
        self.rows = DecodeRows(self.session)

    def check(self) -> None:
        """Against one forward over all, without a cache."""
        ends = sorted(self.logits)
        if not ends:
            return
        logits = self.model.model(mx.array([self.session.recorded[: ends[-1]]]), cache=self.model.make_layers())
        off = mx.abs(mx.stack([self.logits[end] for end in ends]) - logits[0, mx.array(ends) - 1]).max(-1)
        distances = dict(zip(ends, cast("list[float]", off.tolist()), strict=True))
        assert largest(off) <= self.model.tolerance, f"logits after so many tokens differ by {distances}"


def step(among: Sequence[Row], tokens: Sequence[int]) -> None:
    """A token of each, who are all that are in these rows."""
    rows = among[0].rows
    model = among[0].model.model
    logits = rows.compute(lambda read, layers: model(read, cache=layers), mx.array([[token] for token in tokens]))
    mx.eval(logits, rows.arrays())
    for place, (row, token) in enumerate(zip(among, tokens, strict=True)):
        row.session.record(token)
        row.logits[len(row.session.recorded)] = logits[place, -1]


def begin(model: Tiny, cache: TrieCache, prompt: Sequence[int]) -> Row:
    session = cache.begin(prompt)
    assert isinstance(session, TrieSession)
    return Row(model, session)


words_ = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=25)
shares = st.one_of(st.just(1.0), st.floats(0, 1))
chunks = st.sampled_from([1, 5, 16, 33, 64])
pick = st.integers(0, 7)
_ROUNDS = 10
"""The number of attempts that the machines have to find stories in which rows join."""
anybody = precondition(lambda self: self.open)
room = precondition(lambda self: len(self.open) < 3)


class Users(RuleBasedStateMachine):
    """Up to three conversations over one trie cache at a time."""

    model: ClassVar[Tiny]
    sessions: ClassVar[int]
    batches: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Row] = []
        self.histories = [words(40)]

    @initialize(budget=st.sampled_from([None, 400_000, 120_000, 40_000, 0]), gap=st.sampled_from([1, 3, 16]))
    def opens(self, budget: int | None, gap: int) -> None:
        self.budget = budget
        self.cache = TrieCache(
            self.model.make_layers, budget, TurnCheckpoints(TURNS, gap=gap, first_distance=16, recent=3)
        )

    @room
    @rule(which=pick, share=shares, new=words_, ready=st.booleans())
    def begin(self, which: int, share: float, new: list[int], ready: bool) -> None:
        history = self.histories[which % len(self.histories)]
        prompt = [*history[: int(len(history) * share)], *new][-MAX_PROMPT:]
        self.cache.follows(prompt)
        self.open.append(begin(self.model, self.cache, prompt))
        type(self).sessions += 1
        if ready:
            self.open[-1].read_all()

    @anybody
    @rule(who=pick, most=chunks)
    def read(self, who: int, most: int) -> None:
        row = self._row(who)
        if not row.decodes:
            row.read(most)

    @anybody
    @rule(who=pick, tokens=st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=3), steps=st.integers(1, 3))
    def say(self, who: int, tokens: list[int], steps: int) -> None:
        rows = self._row(who).rows
        among = [next(row for row in self.open if row.session is session) for session in rows.sessions]
        among[0].read_all()
        for more in range(steps):
            step(among, [(token + more) % VOCAB for token in tokens[: len(among)]])

    @precondition(lambda self: len(self.open) > 1)
    @rule(who=pick, other=pick)
    def join(self, who: int, other: int) -> None:
        first, second = self._row(who), self._row(other)
        if first.rows is second.rows:
            second = self._row(other + 1)
        if first.rows is second.rows or len(second.rows.sessions) > 1 or not first.rows.batchable:
            return
        first.read_all()
        second.read_all()
        with suppress(ValueError):  # one of them lacks a state
            first.rows.join(second.rows)
            second.rows = first.rows
            type(self).batches += 1
            self.say(who, [who, other, who + other], 2)

    @anybody
    @rule(who=pick)
    def leave(self, who: int) -> None:
        self._row(who).leave()

    @anybody
    @rule(who=pick, how=st.sampled_from(["close", "close", "close", "cancel", "fail", "break"]))
    def close(self, who: int, how: str) -> None:
        row = self._row(who)
        row.leave(settle=how != "cancel")
        if how == "break":
            with suppress(MemoryError), row.session.forward(1):
                _break()
        row.session.close(failed=how == "fail")
        self.open.remove(row)
        row.check()
        self.histories = [*self.histories, [*row.session.recorded]][-6:]
        if not self.open:
            check_trie(self.cache)

    @anybody
    @rule(nbytes=st.sampled_from([0, 20_000, 10**7]))
    def reserve(self, nbytes: int) -> None:
        """Batches are said to hold so much for a moment."""
        self.cache.reserve(nbytes)
        self.cache.reserve(0)

    @precondition(lambda self: not self.open)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.nbytes == 0

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        sequences = {cache.sequences.kept, *(row.session.sequence for row in self.open)}
        described = cache.describe()
        paged_bytes = described.counts.paged_bytes
        nodes = list(cache.trie.nodes())
        held = [slot for node in nodes for slot in node.slots if slot is not None]
        assert (described.snapshots, paged_bytes) == (len(held), sum(slot.nbytes for slot in held))
        assert cache.nbytes == sum(sequence.nbytes for sequence in sequences) + paged_bytes + described.reserved_bytes
        live = [snapshot for sequence in sequences for state in sequence.states for snapshot in state.live]
        assert len(live) == len(set(live))
        assert set(live) == {slot for slot in held if slot.live}
        for node in nodes:
            assert node.locks == sum(node in row.session.node.path() for row in self.open)
        if not self.open:
            assert self.budget is None or cache.nbytes <= self.budget

    def teardown(self) -> None:
        for row in [*self.open]:
            row.leave()
            row.session.close()
            row.check()

    def _row(self, who: int) -> Row:
        return self.open[who % len(self.open)]


def _break() -> None:
    raise MemoryError


def run(kind: str, examples: int, steps: int, derandomize: bool, shrink: bool = True) -> tuple[int, int]:
    """Runs machines over a model; returns how many sessions they opened, and how many joined others."""

    class Machine(Users):
        model = tiny(kind)
        sessions = 0
        batches = 0

    stories = limits(examples, steps, derandomize=derandomize, shrink=shrink)
    run_state_machine_as_test(Machine, settings=stories)
    return Machine.sessions, Machine.batches


@pytest.mark.parametrize("kind", KINDS)
def test_any_users_at_the_same_time_get_the_answers_of_no_cache(kind: str) -> None:
    sessions, batches = run(kind, examples=25, steps=30, derandomize=True)
    for _ in range(_ROUNDS):  # which examples come depends on all that is imported
        if batches > 2 or kind not in BATCHABLE:
            break
        more = run(kind, examples=25, steps=30, derandomize=False)
        sessions, batches = sessions + more[0], batches + more[1]
    assert sessions >= 40
    assert (batches > 2) == (kind in BATCHABLE)
