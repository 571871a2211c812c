"""Answers in rounds over real models, of which it is known beforehand how many drafts are right.

    plain = ask(tiny, NullCache(tiny.facts), prompt, say=20)
    answer = ask_in_rounds(tiny, cache, prompt, plain, rounds=[(5, 3), (2, 1)])    # over and over

A round of (5, 3) is over five tokens of which the first three are those of the plain answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import TypeAlias

import mlx.core as mx
from msgspec.structs import replace

from protocol.stats import CacheCounts
from runner.cache.interface import PrefixCache
from runner.cache.node import spelled
from runner.cache.single import SingleEntryCache
from runner.cache.trie_cache import TrieCache
from runner.numbers.cache import describe_cache
from scripts.tools.models.tiny import VOCAB, Tiny
from tests.lib.driver import Answer

Entry: TypeAlias = tuple[list[int], bool, int, list[tuple[int, int, bool, int] | None]]
"""A node: its tokens from the root, whether it is a checkpoint, when it was used, and its snapshots: start, stop, live,
bytes."""


class Drafting:
    """A session that has read its prompt but for the last token, and what follows that."""

    def __init__(
        self, tiny: Tiny, cache: PrefixCache, prompt: Sequence[int], answer: Sequence[int], chunk: int = 7
    ) -> None:
        """`answer` are the right tokens, as many as there are to be said."""
        session = cache.begin(prompt)
        self.tiny = tiny
        self.session = session
        self.logits: list[mx.array] = []
        """After the last token of the prompt, and each token of the answer."""
        self._tokens = [*prompt, *answer]
        while count := session.next_forward(chunk):
            at = session.position
            with session.forward(count):
                tiny.model(mx.array([prompt[at : at + count]]), cache=session.layers)
            mx.eval(session.state())

    @property
    def left(self) -> int:
        """The tokens whose forward has not been accepted."""
        return len(self._tokens) - self.session.position

    def step(self) -> None:
        """Computes one token."""
        at = self.session.position
        with self.session.forward(1):
            self.logits.append(self._run(self._tokens[at : at + 1])[0])
        self.record(1)

    def draft(self, count: int, right: int) -> mx.array:
        """Runs a round and leaves it open. Returns its logits [count, VOCAB]."""
        at = self.session.position
        drafts = [(token + 1) % VOCAB for token in (self._tokens[at + right : at + count] + [0] * count)]
        with self.session.draft_round(count):
            return self._run([*self._tokens[at : at + right], *drafts[: count - right]])

    def round(self, count: int, right: int) -> bool:
        """Runs a round and accepts its right tokens. Returns False if they had to be computed again."""
        right = min(right, self.left)
        logits = self.draft(count, right)
        there = self.session.accept(right)
        if not there and right > 1:
            logits = self.draft(right, right)
            assert self.session.accept(right)
        self.logits += [*logits[: right if there or right > 1 else 0]]
        if there or right > 1:
            self.record(right)
        elif right:
            self.step()
        return there

    def record(self, passed: int) -> None:
        """Records the tokens that the last `passed` forwards have drawn."""
        at = self.session.position - passed + 1
        for token in self._tokens[at : at + passed]:
            self.session.record(token)

    def say(self, rounds: Sequence[tuple[int, int]]) -> "Drafting":
        """Says all of the answer, with these rounds over and over. A round over a single token is a step."""
        for count, right in cycle(rounds):
            if not self.left:
                break
            if count == 1:
                self.step()
            else:
                self.round(count, right)
        return self

    def answer(self) -> Answer:
        """Returns what was said and the logits that it was taken from, as `ask` does."""
        return Answer(self.session.recorded[self.session.total :], self.logits[:-1], self.session)

    def _run(self, tokens: Sequence[int]) -> mx.array:
        logits = self.tiny.model(mx.array([tokens]), cache=self.session.layers)[0]
        mx.eval(logits)
        return logits


def ask_in_rounds(
    tiny: Tiny,
    cache: PrefixCache,
    prompt: Sequence[int],
    plain: Answer,
    rounds: Sequence[tuple[int, int]],
    chunk: int = 7,
) -> Answer:
    """Serves a prompt, whose answer is that of `plain`, in rounds."""
    with closing(Drafting(tiny, cache, prompt, plain.tokens, chunk)) as drafting:
        return drafting.say(rounds).answer()


def contents(cache: PrefixCache) -> tuple[list[Entry], CacheCounts, Sequence[int]]:
    """Returns what a cache holds between sessions, but for the room in the layers that stay open."""
    counts = describe_cache(cache).counts
    counts = replace(counts, budget_bytes=None, held_bytes=0, live_bytes=0, evicted_bytes=0)
    if isinstance(cache, TrieCache):
        sequences = cache.sequences
        snapshots, recorded = sequences.totals.ledger.count, sequences.end.end if sequences.end else 0
        return list(_entries(cache)), counts, (len(sequences.sessions), snapshots, recorded, cache.reserved_bytes)
    assert isinstance(cache, SingleEntryCache)
    return [], counts, (cache.totals.ledger.count, len(cache.tokens))


def _entries(cache: TrieCache) -> Iterator[Entry]:
    for node in cache.trie.nodes():
        slots = [None if each is None else (each.start, each.stop, each.live, each.nbytes) for each in node.slots]
        yield [*spelled(node.path())], node.checkpoint, node.used, slots


@contextmanager
def closing(drafting: Drafting) -> Iterator[Drafting]:
    """Closes the session at the end."""
    try:
        yield drafting
    finally:
        drafting.session.close()
