"""Whatever happens to conversations, the trie cache answers as no cache does (scenario 76).

Hypothesis invents users: they go on, go back, ask again, change what was said, leave in the middle of a prompt or of an
answer; forwards break; memory is short. Every answer is compared with a run without a cache, and after every request
the trie, its snapshots and the layers are checked against each other.

`test_the_machine_notices_a_wrong_state` shows that a single wrong entry does not pass.

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar
from unittest.mock import patch

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
from runner.cache.layers.kv import KVState
from runner.cache.trie_cache import TrieCache
from scripts.tools.models.tiny import KINDS, VOCAB, Tiny, tiny
from tests.lib.driver import Accident, ask, ask_uncached, check_equal, check_trie
from tests.lib.machines import limits

MAX_PROMPT = 100
TURNS = frozenset({1, 2})

words = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
shares = st.floats(0, 1)
chunks = st.sampled_from([1, 5, 16, 33, 64])
said = st.integers(0, 6)
pick = st.integers(0, 7)


class Users(RuleBasedStateMachine):
    """Some conversations over one trie cache."""

    model: ClassVar[Tiny]
    steps: ClassVar[int]

    @initialize(budget=st.sampled_from([None, 400_000, 120_000, 40_000, 0]), gap=st.sampled_from([1, 3, 16]))
    def begin(self, budget: int | None, gap: int) -> None:
        self.budget = budget
        points = TurnCheckpoints(TURNS, gap=gap, first_distance=16, recent=3)
        self.cache = TrieCache(self.model.make_layers, budget, points)
        self.histories: list[list[int]] = []

    @rule(new=words, say=said, chunk=chunks)
    def start(self, new: list[int], say: int, chunk: int) -> None:
        self._ask(new, say, chunk)

    @precondition(lambda self: self.histories)
    @rule(which=pick, new=words, say=said, chunk=chunks)
    def go_on(self, which: int, new: list[int], say: int, chunk: int) -> None:
        self._ask([*self._history(which), *new], say, chunk)

    @precondition(lambda self: self.histories)
    @rule(which=pick, share=shares, new=words, say=said, chunk=chunks)
    def branch(self, which: int, share: float, new: list[int], say: int, chunk: int) -> None:
        history = self._history(which)
        self._ask([*history[: int(len(history) * share)], *new], say, chunk)

    @precondition(lambda self: self.histories)
    @rule(which=pick, share=shares, word=st.integers(0, VOCAB - 1), say=said, chunk=chunks)
    def edit(self, which: int, share: float, word: int, say: int, chunk: int) -> None:
        """One word of what was said is another one; all that follows it stays."""
        history = list(self._history(which))
        history[int((len(history) - 1) * share)] = word
        self._ask(history, say, chunk)

    @precondition(lambda self: self.histories)
    @rule(which=pick, share=shares, say=said, chunk=chunks)
    def truncate(self, which: int, share: float, say: int, chunk: int) -> None:
        history = self._history(which)
        self._ask(history[: max(1, int(len(history) * share))], say, chunk)

    @precondition(lambda self: self.histories)
    @rule(which=pick, say=said, chunk=chunks)
    def ask_again(self, which: int, say: int, chunk: int) -> None:
        self._ask(self._history(which), say, chunk)

    @precondition(lambda self: self.histories)
    @rule(which=pick, new=words, chunk=chunks, kind=st.sampled_from(["cancel", "skip", "break", "poison"]), at=pick)
    def fail(self, which: int, new: list[int], chunk: int, kind: str, at: int) -> None:
        """The user leaves, or something goes wrong, somewhere between the first chunk and the last word."""
        self._ask([*self._history(which), *new], 4, chunk, Accident(kind, at))

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.nbytes == 0

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        if hasattr(self, "cache"):
            check_trie(self.cache)
            assert self.budget is None or self.cache.nbytes <= self.budget

    def _history(self, which: int) -> list[int]:
        return self.histories[which % len(self.histories)]

    def _ask(self, prompt: list[int], say: int, chunk: int, accident: Accident | None = None) -> None:
        type(self).steps += 1
        prompt = prompt[-MAX_PROMPT:]
        answer = ask(self.model, self.cache, prompt, say=say, chunk=chunk, accident=accident)
        check_equal(self.model, answer, ask_uncached(self.model, prompt, say=len(answer.logits), chunk=chunk))
        self.histories = [*self.histories, [*prompt, *answer.tokens]][-6:]


def run(kind: str, examples: int, steps: int, derandomize: bool, shrink: bool = True) -> int:
    """Runs machines over a model; returns how many requests they made."""

    class Machine(Users):
        model = tiny(kind)
        steps = 0

    stories = limits(examples, steps, derandomize=derandomize, shrink=shrink)
    run_state_machine_as_test(Machine, settings=stories)
    return Machine.steps


@pytest.mark.parametrize("kind", KINDS)
def test_any_users_get_the_answers_of_no_cache(kind: str) -> None:
    assert run(kind, examples=12, steps=20, derandomize=True) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_users_get_the_answers_of_no_cache(kind: str) -> None:
    assert run(kind, examples=80, steps=30, derandomize=False) >= 500


def test_the_machine_notices_a_wrong_state() -> None:
    with _one_entry_zeroed(KVState._write), pytest.raises(AssertionError):
        run("llama", examples=20, steps=16, derandomize=True, shrink=False)


@contextmanager
def _one_entry_zeroed(write: Callable[..., None]) -> Iterator[None]:
    """Every page-in puts a zero in place of the first entry that it brings back."""

    def wrong(self: KVState, *args: object) -> None:
        at = self.offset
        write(self, *args)
        self._put(
            [
                mx.concatenate([x[..., :at, :], x[..., at : at + 1, :] * 0, x[..., at + 1 :, :]], -2)
                for x in self.arrays()
            ]
        )

    with patch.object(KVState, "_write", wrong):
        yield
