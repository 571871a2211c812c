"""Keeps the trie and the layers over it within a budget, and decides which nodes count as used."""

from runner.cache import resume
from runner.cache.eviction import Eviction, EvictionOrder, LeastRecentLeaf, LeastWorth
from runner.cache.node import Node
from runner.cache.sequences import LiveSequences
from runner.cache.trie import PrefixTrie
from runner.logs import Log

log = Log(__name__)


class BudgetEnforcer:
    """Evicts entries of one trie and its sequences until they fit. The budget is passed with every call, as it may
    change."""

    def __init__(self, trie: PrefixTrie, sequences: LiveSequences) -> None:
        self._trie = trie
        self._sequences = sequences
        self._stateful: frozenset[int] = frozenset()
        self._eviction = Eviction(trie, LeastRecentLeaf())
        self._warned: set[str] = set()

    def touch(self, node: Node) -> None:
        """Marks a node as just used, with the nodes that the eviction order says are used with it."""
        self._trie.touch(self._current().order.used(node))

    def reset(self) -> None:
        """Starts over after the trie was cleared."""
        self._eviction = Eviction(self._trie, self._eviction.order)

    def enforce(self, budget_bytes: int | None, reserved_bytes: int, spare_bytes: int) -> None:
        """Evicts until everything held, with the reserved bytes, fits the budget; what open sessions use stays. If
        anything has to go, goes on until `spare_bytes` are free."""
        sequences, ledger, eviction = self._sequences, self._sequences.facts.ledger, self._current()
        eviction.refresh()
        if budget_bytes is None or sequences.nbytes + reserved_bytes <= budget_bytes:
            return
        if sequences.end is not None:
            if sequences.sessions:
                sequences.evict_kept()
            elif sequences.kept.nbytes > budget_bytes:
                self._truncate(sequences.end, budget_bytes)
        most = budget_bytes - spare_bytes - reserved_bytes - sequences.layer_bytes
        for victim in eviction.victims(sequences.end):
            if ledger.nbytes <= most:
                sequences.flush()
                return
            held_bytes = ledger.nbytes
            if victim.children:
                self._trie.merge(victim)
            else:
                self._trie.remove(victim)
            sequences.facts.count_eviction(held_bytes - ledger.nbytes)
        sequences.flush()
        if sequences.end is not None:
            resume.return_to_layers(sequences.kept, sequences.end)
        if sequences.nbytes + reserved_bytes > budget_bytes > 0:
            self._warn_once("what runs needs more than the cache may hold", reserved_bytes, budget_bytes)

    def _truncate(self, end: Node, budget_bytes: int) -> None:
        """Shortens the idle conversation, which stands at `end`, to as many tokens as fit."""
        kept = self._sequences.kept
        kept.trim(0)
        if kept.nbytes > budget_bytes:
            self._warn_once("a conversation is larger than the cache: only its beginning is kept", 0, budget_bytes)
            held_bytes = self._sequences.nbytes
            self._sequences.end = resume.truncate(kept, self._trie, end, budget_bytes)
            self._sequences.facts.count_eviction(held_bytes - self._sequences.nbytes)

    def _current(self) -> Eviction:
        """Returns the eviction that suits the layers, as far as they are known."""
        stateful = frozenset(slot for slot, state in self._sequences.kept.used if not state.sliceable)
        if stateful != self._stateful:
            self._stateful = stateful
            order: EvictionOrder = LeastWorth(stateful) if stateful else LeastRecentLeaf()
            self._eviction = Eviction(self._trie, order)
        return self._eviction

    def _warn_once(self, what: str, reserved_bytes: int, budget_bytes: int) -> None:
        if what not in self._warned:
            log.warning(what, held_bytes=self._sequences.nbytes + reserved_bytes, budget_bytes=budget_bytes)
        self._warned.add(what)
