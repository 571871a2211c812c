"""Which nodes of the trie have to go, and in which order, when its pieces take too much room.

An `EvictionOrder` compares two nodes. `Eviction` keeps all nodes of a trie in that order as they change, so that the
next one is found without a look at the others.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from itertools import count
from math import floor, log2
from typing import TypeAlias

from runner.cache.trie import Node, PrefixTrie


class EvictionOrder(ABC):
    """The node goes first that was idle for longest, times its weight; of those used at once the deepest.

    What goes is removed if it is a leaf, else merged into its only child.
    """

    @abstractmethod
    def used(self, node: Node) -> Iterable[Node]:
        """The nodes that count as used when `node` was."""

    @abstractmethod
    def evictable(self, node: Node) -> bool:
        """Whether it can be removed or merged, and something is won. For locked nodes: once they are not."""

    @abstractmethod
    def weight(self, node: Node) -> float:
        """How much sooner it goes than others as old. One of a few dozen values, whatever the nodes."""

    def rank(self, node: Node, now: int) -> tuple[float, int, int]:
        """The least goes first. `now` is the time of the trie."""
        return _rank(self.weight(node), node.used, -node.end, now)


class LeastRecentLeaf(EvictionOrder):
    """For models of which every layer is sliceable: the leaf that was used longest ago.

    An inner node is never worth removing then, its tokens would only move into the child. A use counts for the whole
    way to the root, so that no node is older than what hangs below it.
    """

    def used(self, node: Node) -> Iterable[Node]:
        return node.path()

    def evictable(self, node: Node) -> bool:
        return not node.children

    def weight(self, node: Node) -> float:  # noqa: ARG002
        return 1.0


class LeastWorth(EvictionOrder):
    """For models with states or windows: what has been idle for longest, for the bytes it frees and the tokens it takes
    to have it again.

    Leaves and nodes with one child, which gives back its state; where several conversations part it stays. Each node
    ages by its own use, so that a point which nobody came back to goes before its neighbours. A state after a long
    system prompt saves thousands of tokens, one between two messages a few dozen, for the same bytes: by age alone the
    first goes as easily as the second.
    """

    _FORWARD = 16  # tokens: what a forward costs however short it is
    _STEPS = 8  # weights in each doubling: those within 9 % of each other are one

    def __init__(self, slots: Collection[int]) -> None:
        """`slots`: those of the layers that are not sliceable, of which a merge frees something."""
        self._slots = frozenset(slots)

    def used(self, node: Node) -> Iterable[Node]:
        return (node,)

    def evictable(self, node: Node) -> bool:
        return not node.children or (len(node.children) == 1 and self._freed(node) > 0)

    def weight(self, node: Node) -> float:
        freed = self._freed(node)
        if not freed:
            return 0.0
        exact = log2(freed / (len(node.tokens) + self._FORWARD))
        return float(2 ** (floor(self._STEPS * exact) / self._STEPS))

    def _freed(self, node: Node) -> int:
        if not node.children:
            return node.nbytes
        return sum(held.nbytes for slot, held in enumerate(node.slots) if held is not None and slot in self._slots)


_Place: TypeAlias = tuple[int, int, int, Node]
"""used, -end, a number of its own, and the node."""


class Eviction:
    """The nodes of one trie that may go, always in order.

    Those of one weight stand in a line, at whose head is the one that was used first. They keep their order as time
    goes by, so whoever is next stands at the head of a line.
    """

    def __init__(self, trie: PrefixTrie, order: EvictionOrder) -> None:
        self.order = order
        self._trie = trie
        self._lines: dict[float, list[_Place]] = {}
        self._places: dict[Node, tuple[float, _Place]] = {}
        self._with_live: set[Node] = set()  # they have live snapshots, which get bytes of their own at any time
        self._numbers = count()
        trie.changed.update(trie.nodes())

    def refresh(self) -> None:
        """Takes notice of what has changed in the trie: call it after every request, or it will take long one day."""
        self._trie.changed.update(self._with_live)
        self._rank_changed()

    def victims(self, spared: Node | None = None) -> Iterator[Node]:
        """One node after the other, in the order in which they go, but for locked ones and `spared`. Each is removed or
        merged before the next is asked for, which those near it may be then. Looks at the nodes that changed, and at
        one node for every weight."""
        self.refresh()
        while True:
            self._rank_changed()
            if not self._lines:
                return
            now = self._trie.now
            heads = ((_rank(weight, *line[0][:2], now), line[0]) for weight, line in self._lines.items())
            node = min(heads)[1][-1]
            if node.locks or node is spared:
                self._remove(node)
                if node is spared:
                    self._with_live.add(node)
                continue
            yield node

    def _rank_changed(self) -> None:
        changed = self._trie.changed
        while changed:
            self._rank_anew(changed.pop())

    def _rank_anew(self, node: Node) -> None:
        self._remove(node)
        if node.parent is None or node.locks:
            return  # it is gone, or it changes again when it is unlocked
        if any(held is not None and held.live for held in node.slots):
            self._with_live.add(node)
        if self.order.evictable(node):
            weight, place = self.order.weight(node), (node.used, -node.end, next(self._numbers), node)
            insort(self._lines.setdefault(weight, []), place)
            self._places[node] = weight, place

    def _remove(self, node: Node) -> None:
        self._with_live.discard(node)
        if node in self._places:
            weight, place = self._places.pop(node)
            line = self._lines[weight]
            del line[bisect_left(line, place)]
            if not line:
                del self._lines[weight]


def _rank(weight: float, used: int, depth: int, now: int) -> tuple[float, int, int]:
    return (-(now + 1 - used) * weight, used, depth)
