"""What goes when the trie and the layers over it hold too much, and what counts as used meanwhile."""

from runner.cache import resume
from runner.cache.eviction import Eviction, LeastRecentLeaf, LeastWorth, Order
from runner.cache.sequences import Stacks
from runner.cache.trie import Node, PrefixTrie
from runner.logs import Log

log = Log(__name__)


class Budget:
    """Makes what is held fit some bytes; told every time, for they may change. Goes with one trie and its stacks."""

    def __init__(self, trie: PrefixTrie, stacks: Stacks) -> None:
        self._trie = trie
        self._stacks = stacks
        self._stateful: frozenset[int] = frozenset()
        self._eviction = Eviction(trie, LeastRecentLeaf())
        self._said: set[str] = set()

    def touch(self, node: Node) -> None:
        """Someone has come to this node."""
        self._trie.touch(self._current().order.used(node))

    def renew(self) -> None:
        """The trie was cleared."""
        self._eviction = Eviction(self._trie, self._eviction.order)

    def fit(self, budget_bytes: int | None, reserved_bytes: int, spare_bytes: int) -> None:
        """Makes what is held fit the budget beside what is reserved, but for what open sessions use; if it did not,
        with so much to spare."""
        stacks, ledger, eviction = self._stacks, self._stacks.layout.ledger, self._current()
        eviction.follow()
        if budget_bytes is None or stacks.nbytes + reserved_bytes <= budget_bytes:
            return
        if stacks.end is not None:
            if stacks.sessions:
                stacks.give_up_kept()
            elif stacks.kept.nbytes > budget_bytes:
                self._shorten(stacks.end, budget_bytes)
        most = budget_bytes - spare_bytes - reserved_bytes - stacks.layer_bytes
        for victim in eviction.victims(stacks.end):
            if ledger.nbytes <= most:
                stacks.settle()
                return
            held_bytes = ledger.nbytes
            if victim.children:
                self._trie.merge(victim)
            else:
                self._trie.remove(victim)
            stacks.layout.count_eviction(held_bytes - ledger.nbytes)
        stacks.settle()
        if stacks.end is not None:
            resume.lend(stacks.kept, stacks.end)
        if stacks.nbytes + reserved_bytes > budget_bytes > 0:
            self._say_once("what runs needs more than the cache may hold", reserved_bytes, budget_bytes)

    def _shorten(self, end: Node, budget_bytes: int) -> None:
        """Keeps of the conversation that nobody uses, and which stands at `end`, as much as fits."""
        kept = self._stacks.kept
        kept.trim(0)
        if kept.nbytes > budget_bytes:
            self._say_once("a conversation is larger than the cache: only its beginning is kept", 0, budget_bytes)
            held_bytes = self._stacks.nbytes
            self._stacks.end = resume.shorten(kept, self._trie, end, budget_bytes)
            self._stacks.layout.count_eviction(held_bytes - self._stacks.nbytes)

    def _current(self) -> Eviction:
        """In the order that the layers ask for, as far as they are known."""
        stateful = frozenset(slot for slot, state in self._stacks.kept.used if not state.sliceable)
        if stateful != self._stateful:
            self._stateful = stateful
            order: Order = LeastWorth(stateful) if stateful else LeastRecentLeaf()
            self._eviction = Eviction(self._trie, order)
        return self._eviction

    def _say_once(self, what: str, reserved_bytes: int, budget_bytes: int) -> None:
        if what not in self._said:
            log.warning(what, held_bytes=self._stacks.nbytes + reserved_bytes, budget_bytes=budget_bytes)
        self._said.add(what)
