"""Which nodes of the trie have to go, and in which order, when its pieces take too much room."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from runner.cache.trie import Node


class Eviction(ABC):
    """An order in which nodes go, and what counts as their being used."""

    @abstractmethod
    def used(self, node: Node) -> Iterable[Node]:
        """The nodes that count as used when `node` was."""

    def victim(self, nodes: Iterable[Node]) -> Node | None:
        """The next of these to go, if any may. A leaf is removed, a node with one child merged into it."""
        return next(self.victims(nodes), None)

    def victims(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """One of these after the other, in the order in which they go. Each is removed or merged before the next is
        asked for, which those above it may be then. Costs O(log n) a victim after the first."""
        among = list(nodes)
        known = set(among)
        now = max((node.used for node in among), default=0)
        serial = count()
        waiting = [(self._rank(node, now), next(serial), node) for node in among if self._may_go(node)]
        heapify(waiting)
        while waiting:
            before, _, node = heappop(waiting)
            if node.parent is None or not self._may_go(node):
                continue
            if self._rank(node, now) > before:
                continue  # it was ranked anew since
            near = [*node.path()[:-1], *node.children.values()]
            yield node
            for other in near:
                if other in known and self._may_go(other):
                    heappush(waiting, (self._rank(other, now), next(serial), other))

    @abstractmethod
    def _may_go(self, node: Node) -> bool:
        """Whether it can be removed or merged, and something is won."""

    @abstractmethod
    def _rank(self, node: Node, now: int) -> tuple[float, ...]:
        """The least goes first. `now` is the time of the last use of any."""


class LeastRecentLeaf(Eviction):
    """For models of which every layer is sliceable: the leaf that was used longest ago.

    An inner node is never worth removing then, its tokens would only move into the child. A use counts for the whole
    way to the root, so that no node is older than what hangs below it.
    """

    def used(self, node: Node) -> Iterable[Node]:
        return node.path()

    def _may_go(self, node: Node) -> bool:
        return not node.locks and not node.children

    def _rank(self, node: Node, now: int) -> tuple[float, ...]:  # noqa: ARG002
        return (node.used, -node.end)


class LeastRecentPoint(Eviction):
    """Ollama's order for models with states, on which `LeastWorth` builds.

    Leaves and nodes with one child, oldest first, then deepest, then largest; each node ages by its own use, so that a
    point which nobody came back to goes before its neighbours.

    A node with one child that goes gives its state back; where several conversations part it stays.
    """

    def used(self, node: Node) -> Iterable[Node]:
        return (node,)

    def _may_go(self, node: Node) -> bool:
        return not node.locks and len(node.children) < 2

    def _rank(self, node: Node, now: int) -> tuple[float, ...]:  # noqa: ARG002
        return (node.used, -node.end, -node.nbytes)


class LeastWorth(LeastRecentPoint):
    """For models with states or windows: what has been idle for longest, for the bytes it frees and the tokens it takes
    to have it again.

    A state after a long system prompt saves thousands of tokens, one between two messages a few dozen, for the same
    bytes: by age alone the first goes as easily as the second. Ages count as in Ollama's order.
    """

    _FORWARD = 16  # tokens: what a forward costs however short it is

    def __init__(self, slots: Collection[int]) -> None:
        """`slots`: those of the layers that are not sliceable, of which a merge frees something."""
        self._slots = frozenset(slots)

    def _may_go(self, node: Node) -> bool:
        return super()._may_go(node) and (not node.children or self._freed(node) > 0)

    def _rank(self, node: Node, now: int) -> tuple[float, ...]:
        idle = now + 1 - node.used
        return (-idle * self._freed(node) / (len(node.tokens) + self._FORWARD), node.used, -node.end)

    def _freed(self, node: Node) -> int:
        if not node.children:
            return node.nbytes
        return sum(held.nbytes for slot, held in enumerate(node.slots) if held is not None and slot in self._slots)
