"""A session of the trie cache."""

from bisect import insort
from collections.abc import Callable

from runner.cache.checkpoints import Checkpoint
from runner.cache.interface import Match
from runner.cache.sequence import SequenceLayers
from runner.cache.session import LiveSession
from runner.cache.trie import Node

CHECK_TOKENS = 64
"""How often a decode has the cache look at the bytes held; layers grow by more tokens than that at a time."""


class TrieSession(LiveSession):
    """A session along a path of the trie, stopping its prefill where a restore point is wanted."""

    def __init__(
        self,
        sequence: SequenceLayers,
        prompt: list[int],
        match: Match,
        node: Node,
        passed: Callable[["TrieSession", int], None],
        end: Callable[[LiveSession, bool], None],
    ) -> None:
        """`node` is where the layers stand; `passed(session, count)` is called after each forward over
        `count` tokens, `end(session, failed)` once."""
        super().__init__(sequence, prompt, match, end)
        self.node = node  # as far as the trie has followed; locked
        self.checkpoints: list[Checkpoint] = []
        self.detached = False
        """Whether the trie that it went along was given up."""
        self._report = passed

    def add_checkpoint(self, at: int) -> None:
        """The prefill stops there too, for another prompt that leaves this one there."""
        if all(point.at != at for point in self.checkpoints):
            insort(self.checkpoints, Checkpoint(at, keep=False))
            self.due = min(self.due, at)

    def _next_checkpoint(self) -> int | None:
        return next((point.at for point in self.checkpoints if point.at > self.position), None)

    def _passed(self, count: int) -> None:
        self._report(self, count)
        if self.sequence.facts.bytes_of(1):  # else the next forward may be the one that shows what a token takes
            self.due = self.position - self.position % CHECK_TOKENS + CHECK_TOKENS
            if self.checkpoints:
                self.due = min(self.due, self.checkpoints[0].at)
