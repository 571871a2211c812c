"""A session of the trie cache."""

from collections.abc import Callable, Iterable

from runner.cache.interface import Match
from runner.cache.points import Point
from runner.cache.session import LiveSession
from runner.cache.stack import LayerStack
from runner.cache.trie import Node


class TrieSession(LiveSession):
    """A session along a path of the trie, stopping its prefill where a restore point is wanted."""

    def __init__(
        self,
        stack: LayerStack,
        prompt: list[int],
        match: Match,
        node: Node,
        passed: Callable[["TrieSession", int], None],
        end: Callable[[LiveSession, bool], None],
    ) -> None:
        """`node` is where the layers stand; `passed(session, count)` is called after each forward over `count` tokens,
        `end(session, failed)` once."""
        super().__init__(stack, prompt, match, end)
        self.node = node  # as far as the trie has followed; locked
        self.points: list[Point] = []
        self._report = passed

    def _stops(self) -> Iterable[int]:
        return [point.at for point in self.points]

    def _passed(self, count: int) -> None:
        self._report(self, count)
