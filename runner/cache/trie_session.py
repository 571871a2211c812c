"""A session of the trie cache."""

from bisect import insort
from collections.abc import Callable
from itertools import takewhile

from runner.cache.checkpoints import Checkpoint
from runner.cache.interface import Match
from runner.cache.node import Node, keys
from runner.cache.sequence import SequenceLayers
from runner.cache.session import LiveSession
from runner.cache.trie import PrefixTrie

CHECK_TOKENS = 64
"""The decode steps between two checks of the bytes held; layers grow by more tokens at a time."""


class TrieSession(LiveSession):
    """A session along a path of the trie. Its prefill stops at checkpoints."""

    def __init__(
        self,
        sequence: SequenceLayers,
        prompt: list[int],
        match: Match,
        node: Node,
        trie: PrefixTrie,
        passed: Callable[["TrieSession", int, bool], None],
        end: Callable[[LiveSession, bool], None],
    ) -> None:
        """`node` of the trie is where the layers stand. `passed(session, count, stepwise)` is called as `_passed` is,
        `end(session, failed)` once."""
        super().__init__(sequence, prompt, match, end)
        self._trie = trie
        self._left_at: Node | None = None  # what is recorded behind this node is no path of the trie
        self.node = node  # the last node that it has reached; locked
        self.checkpoints: list[Checkpoint] = []
        self.detached = False
        """True if the trie was cleared under this session: it keeps its layers, and stores nothing."""
        self._report = passed
        self.greedy = False
        """True if each token of the answer is the most probable one behind those before it."""
        self.go_back: Callable[[TrieSession, int], None] | None = None
        """Takes layers that are ahead of the record back to so many tokens."""

    def add_checkpoint(self, at: int) -> None:
        """Adds a stop to the prefill, where another prompt diverges from this one."""
        if all(each.at != at for each in self.checkpoints):
            insort(self.checkpoints, Checkpoint(at, keep=False))
            self.due = min(self.due, at)

    def continuation(self, most: int) -> list[int]:
        if self.detached or self._left_at is self.node or most < 1:
            return []
        ahead = self.recorded[self.node.end :]
        if ahead and ahead[0] not in self.node.children:
            return []  # the usual case, and the cheapest
        found = self._trie.continuation(self.node, keys(ahead), most).tolist()
        if ahead and not found:
            self._left_at = self.node  # for good: what is recorded behind it stays
        return [*takewhile(lambda token: token >= 0, found)]

    def end_known(self) -> None:
        self.known = []
        at = len(self.recorded) - 1
        if self.position <= at:
            return
        self._failed = self.cache_invalid = True
        if self.detached or self.go_back is None:
            self.sequence.rewind(at)
        else:
            self.go_back(self, at)
        self._failed = self.cache_invalid = False

    def _next_checkpoint(self) -> int | None:
        return next((each.at for each in self.checkpoints if each.at > self.position), None)

    def _passed(self, count: int, *, stepwise: bool) -> None:
        self._report(self, count, stepwise)
        if self.sequence.facts.bytes_of(1):  # else the next forward may show what a token takes
            self.due = self.position - self.position % CHECK_TOKENS + CHECK_TOKENS
            if self.checkpoints:
                self.due = min(self.due, self.checkpoints[0].at)
