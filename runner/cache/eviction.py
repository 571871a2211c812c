"""Chooses the nodes of the trie to evict, and their order.

An `EvictionOrder` weighs nodes. `Eviction` keeps all nodes of a trie in that order as they change, so that it finds the
next victim without looking at all nodes. `BudgetEnforcer` evicts until the rest fits the budget.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from math import floor, log2
from typing import TypeAlias

from runner.cache import resume
from runner.cache.checkpoints import Site
from runner.cache.node import Node
from runner.cache.sequences import LiveSequences
from runner.cache.trie import PrefixTrie
from runner.logs import Log

log = Log(__name__)


class EvictionOrder:
    """The node with the largest product of idle time and weight is evicted first; of nodes used at the same time, the
    deepest. Evicting a leaf removes it; evicting a node with one child merges the node into the child.

    A use of a node counts for its whole path. If all layers are sliceable, leaves are evicted: the tokens of an inner
    node would only move into the child. The weight depends on the chance alone: a chat that drops its thinking does not
    come back to an answer, and what no request has used yet may be of a conversation that has ended.

    For a model with states or tails, the weight of a node is the bytes that its eviction frees, divided by the tokens
    to compute again and by the chance that a request resumes there. A node with one child can lose its state; a node at
    which conversations diverge stays. A state after a long system prompt saves thousands of tokens; a state between two
    messages has the same bytes and saves a few dozen tokens. By age alone, both would be evicted alike. The chance is
    taken from the habits of the conversation: the answers of a chat that drops its thinking go first, those of an agent
    go last. Checkpoints of running requests count as twice as likely to be used.
    """

    _FORWARD = 16  # tokens: the fixed cost of a forward
    _STEPS = 8  # weights in each doubling: weights that differ by less than 9 % count as equal
    _LEAST = 0.1  # the chance of a checkpoint that no request has used yet, or that the last request passed
    _USED = 1.25  # the chance of tokens that a request has used, over that of others
    _RUNNING = 2  # the chance of running requests' checkpoints, over that of others

    def __init__(self, slots: Collection[int] = ()) -> None:
        """`slots` are the slots of layers that are not sliceable: merging a node frees these layers' snapshots."""
        self._slots = frozenset(slots)

    def used(self, node: Node) -> Sequence[Node]:
        """Returns the nodes that count as used when `node` is used."""
        return node.path()

    def evictable(self, node: Node) -> bool:
        """Returns True if the node can be removed or merged, and this frees something. Ignores locks."""
        return not node.children or (len(node.children) == 1 and self._freed(node) > 0)

    def weight(self, node: Node) -> float:
        """Returns the factor of the node's idle time in the product. There are about a hundred different weights."""
        saved = self._freed(node) / (len(node.tokens) + self._FORWARD) if self._slots else 1.0
        if not saved:
            return 0.0
        chance = self._chance(node) * (self._RUNNING if self._slots and node.locks else 1)
        return float(2 ** (floor(self._STEPS * log2(saved / chance)) / self._STEPS))

    def _chance(self, node: Node) -> float:
        """Returns the chance that the next request through the node resumes at its end; for sliceable layers, that it
        uses the node, up to a common factor. Requests that go on after the last node of a conversation return to that
        node, too. Few requests return to what another has passed, unless nothing is left after it."""
        if not self._slots:
            share = max(self._LEAST, node.habits[Site.END]) if node.site is Site.END else 1.0
            return share if node.passed is None else share * self._USED
        if node.passed and node.children:
            return self._LEAST
        nearest = max(node.site, Site.BEFORE) if node.children else Site.END
        return max(self._LEAST, sum(node.habits[nearest : node.site + 1]))

    def _freed(self, node: Node) -> int:
        if not node.children:
            return node.nbytes
        return sum(held.nbytes for slot in self._slots for held in node.slots[slot : slot + 1] if held is not None)


_USE = 16
"""The age of a node that was just used, in ticks. A request has several ticks: which of its nodes was used first says
little."""
_Place: TypeAlias = tuple[int, int, int, Node]
"""The last use of a node, its negative end, a unique number, and the node."""


class Eviction:
    """The nodes of one trie that can be evicted, always in order. Nodes of one weight form a line, least recently used
    first. The order within a line does not change as time passes, so the next victim is the first node of some line."""

    def __init__(self, trie: PrefixTrie, order: EvictionOrder) -> None:
        self.order = order
        self._trie = trie
        self._lines: dict[float, list[_Place]] = {}
        self._places: dict[Node, tuple[float, _Place]] = {}
        self._with_live: set[Node] = set()  # nodes with live snapshots, which may be paged out at any time
        self._numbers = count()
        trie.changed.update(trie.nodes())

    def refresh(self) -> None:
        """Puts the nodes that have changed in order. Call it after every request: it takes longer for more changes."""
        self._trie.changed.update(self._with_live)
        self._rank_changed()

    def victims(self) -> Iterator[Node]:
        """Yields the victims one after the other, except nodes where layers in use stand. Remove or merge a victim
        before you ask for the next: its parent may be evictable afterwards. A victim that you leave as it is comes
        again after the next `refresh`. Looks only at changed nodes, and at one node for each weight."""
        self.refresh()
        while True:
            self._rank_changed()
            if not self._lines:
                return
            now = self._trie.now
            heads = ((_rank(weight, *line[0][:2], now), line[0]) for weight, line in self._lines.items())
            node = min(heads)[1][-1]
            yield node
            if node not in self._trie.changed:
                self._remove(node)
                self._with_live.add(node)

    def _rank_changed(self) -> None:
        changed = self._trie.changed
        while changed:
            node = changed.pop()
            self._remove(node)
            if node.parent is None or node.occupied:
                continue  # the node is removed, or `unlock` adds it to `changed` later
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
    return (-(now + _USE - used) * weight, used, depth)


_SHARE = 8  # checkpoints of running requests may keep an eighth of the budget, even if there is no room for them


class BudgetEnforcer:
    """Evicts entries of one trie and its sequences until the rest fits a budget."""

    def __init__(self, trie: PrefixTrie, sequences: LiveSequences, order: type[EvictionOrder] = EvictionOrder) -> None:
        self._trie, self._sequences, self._order = trie, sequences, order
        self._warned: set[str] = set()
        self.reset()

    def touch(self, node: Node) -> None:
        """Marks the nodes as just used that count as used when `node` is used."""
        self._trie.touch(self._eviction.order.used(node))

    def reset(self) -> None:
        """Forgets the nodes in order, and chooses the order for the kept layers. Call it after the trie was cleared."""
        stateful = [slot for slot, state in self._sequences.kept.used if not state.sliceable]
        self._eviction = Eviction(self._trie, self._order(stateful))

    def enforce(self, budget_bytes: int | None, reserved_bytes: int, spare_bytes: int) -> None:
        """Evicts until layers, snapshots and reserved bytes fit the budget. Parked sequences go first; if they are not
        enough, frees `spare_bytes` more. The tokens of open sessions stay, and a few of their checkpoints."""
        sequences, ledger, eviction = self._sequences, self._sequences.totals.ledger, self._eviction
        eviction.refresh()
        if budget_bytes is None:
            return
        while sequences.nbytes + reserved_bytes > budget_bytes:
            if not sequences.parked:
                break
            sequences.evict_parked()
        else:
            return
        for sequence in sequences.all:
            sequence.page_out_passed()  # a live snapshot frees nothing if it is evicted
        if sequences.end is not None:
            if sequences.sessions:
                sequences.evict_kept()
            elif sequences.kept.nbytes > budget_bytes:
                self._truncate(sequences.end, budget_bytes)
        if sequences.end is not None:
            resume.replace_copies(sequences.kept, sequences.end)
        most = budget_bytes - spare_bytes - reserved_bytes - sequences.layer_bytes
        # If requests need more than the budget, a few of their checkpoints stay, for the turn after this one.
        least = max(budget_bytes // _SHARE, sequences.facts.point_bytes * len(sequences.sharing))
        for victim in eviction.victims():
            if ledger.nbytes <= most:
                sequences.flush()
                return
            if victim is sequences.end or (victim.locks and ledger.nbytes <= least):
                continue
            held_bytes = ledger.nbytes
            if (child := victim.only_child()) is not None:
                sequences.claim(victim, child)
                self._trie.merge(victim)
            else:
                self._trie.remove(victim)
            sequences.totals.count_eviction(held_bytes - ledger.nbytes)
        sequences.flush()
        if sequences.nbytes + reserved_bytes > budget_bytes > 0:
            self._warn_once("running requests need more than the cache may hold", reserved_bytes, budget_bytes)

    def _truncate(self, end: Node, budget_bytes: int) -> None:
        """Shortens the idle conversation, which stands at `end`, to the beginning that fits the budget."""
        kept = self._sequences.kept
        kept.trim(0)
        if kept.nbytes > budget_bytes:
            self._warn_once("a conversation is larger than the cache: only its beginning is kept", 0, budget_bytes)
            held_bytes = self._sequences.nbytes
            self._sequences.end = resume.truncate(kept, self._trie, end, budget_bytes)
            self._sequences.totals.count_eviction(held_bytes - self._sequences.nbytes)

    def _warn_once(self, what: str, reserved_bytes: int, budget_bytes: int) -> None:
        if what not in self._warned:
            log.warning(what, held_bytes=self._sequences.nbytes + reserved_bytes, budget_bytes=budget_bytes)
        self._warned.add(what)
