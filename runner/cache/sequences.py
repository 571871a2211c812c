"""The sequences of layers beside one trie: one for each open session, and some that no session uses.

The sequence that was released last is `kept`. Sequences that were released earlier are `parked`. There are at most as
many sequences as sessions were ever open together: so conversations that take turns continue without copies.

Invariants: a live snapshot of a sequence lies on the path to the sequence's node, or is beyond it and not yet
overwritten; the kept sequence stands at the node `end` while no session uses this sequence. `end` is None if the kept
sequence is empty or in use. A parked sequence stands at its node, which is locked.
"""

from collections.abc import Sequence

from runner.cache import resume
from runner.cache.layer_interface import Snapshot
from runner.cache.layers.snapshot import Ledger
from runner.cache.node import Node
from runner.cache.sequence import SequenceLayers, Totals
from runner.cache.session import TrieSession
from runner.cache.sketch import LayerFacts
from runner.cache.trie import PrefixTrie


class LiveSequences:
    """Assigns layers to sessions. A detached session shares nothing, but stays in `sessions` until it is closed."""

    def __init__(self, facts: LayerFacts, trie: PrefixTrie) -> None:
        self.facts = facts
        self.totals = Totals()
        self._trie = trie
        self.sessions: list[TrieSession] = []
        self.kept = self.fresh()
        self.end: Node | None = None
        self.parked: dict[SequenceLayers, Node] = {}
        """The parked sequences, least recently used first, each with the node where it stands."""
        self._parked_bytes: dict[SequenceLayers, int] = {}  # bytes of the layers: counting takes 70 us a sequence
        self._most = 1  # the largest number of sessions open together

    @property
    def idle(self) -> bool:
        """True if no session uses the kept sequence."""
        return all(session.sequence is not self.kept for session in self.sessions)

    @property
    def sharing(self) -> list[TrieSession]:
        """The open sessions that are attached to the trie."""
        return [session for session in self.sessions if not session.detached]

    @property
    def all(self) -> set[SequenceLayers]:
        """The sequences of open sessions, the kept sequence and the parked sequences."""
        return {self.kept, *self.parked, *(session.sequence for session in self.sessions)}

    @property
    def layer_bytes(self) -> int:
        """Bytes of all layers."""
        running = (sequence.nbytes for sequence in self.all if sequence not in self.parked)
        return sum(self._parked_bytes.values()) + sum(running)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers and of all snapshots that own bytes."""
        return self.layer_bytes + self.totals.ledger.nbytes

    def flush(self) -> None:
        """Evaluates the pending copies for nodes that were split or joined. Raises the errors of MLX."""
        self.totals.ledger.flush()

    def choose(self, path: Sequence[Node], matched: int) -> tuple[SequenceLayers | None, Node | None]:
        """Returns the sequence for a session whose prompt begins with the first `matched` tokens of `path`, and the
        node where this sequence stands; None stands for a fresh sequence. A prompt that continues a conversation gets
        the layers of that conversation. Any other prompt gets the layers that have been idle longest if there are as
        many sequences as sessions were open together."""
        idle: dict[SequenceLayers, Node | None] = {**self.parked}
        if self.idle:
            idle[self.kept] = self.end
        if not idle:
            return None, None
        shared = {sequence: resume.shared_tokens(path, matched, end) for sequence, end in idle.items()}
        best = max(idle, key=lambda sequence: (shared[sequence], sequence is self.kept))
        end = idle[best]
        if end is None or 2 * shared[best] >= end.end:
            return best, end
        if self.idle and self.end is None:
            return self.kept, None
        if len(idle) + len(self.sessions) < self._most:
            return None, None
        return next(iter(idle.items()))

    def acquire(self, path: Sequence[Node], matched: int) -> tuple[SequenceLayers, Node | None]:
        """Returns the result of `choose` for a session that opens now, with a fresh sequence in place of None."""
        self._most = max(self._most, len(self.sessions) + 1)
        sequence, end = self.choose(path, matched)
        if sequence is None:
            return self.fresh(), None
        if sequence is self.kept:
            self.end = None
        else:
            self._unpark(sequence)
        return sequence, end

    def release(self, sequence: SequenceLayers, end: Node) -> None:
        """Keeps a session's layers, which stand at `end`. If the previous kept sequence is idle, parks it, or evicts it
        if other sequences hold at least half of its tokens."""
        former, former_end, idle = self.kept, self.end, self.idle
        self.kept = sequence
        self.end = end
        for node in end.path():
            resume.make_live(sequence, node)  # joining snapshots of two sequences would copy them
        if idle and former is not sequence:
            if former_end is not None and self._is_mostly_its_own(former_end):
                self.parked[former] = former_end
                self._parked_bytes[former] = former.nbytes
                self._trie.lock(former_end)
            else:
                self._evict(former)

    def claim(self, *nodes: Node) -> None:
        """Makes the snapshots of nodes on a running path live in one sequence, so that joining them copies nothing."""
        for session in self.sharing:
            if {*nodes} <= {*session.node.path()}:
                for node in nodes:
                    resume.make_live(session.sequence, node)
                return

    def _is_mostly_its_own(self, end: Node) -> bool:
        """Returns True if a sequence that stands at `end` shares less than half of its tokens with any other
        sequence."""
        held = set(self.end.path()) if self.end else set[Node]()
        return 2 * max(node.end for node in end.path() if node.locks or node in held or node.parent is None) < end.end

    def evict_parked(self) -> None:
        """Empties the least recently used parked sequence, after it pages out the snapshots that only this sequence
        holds."""
        sequence = next(iter(self.parked))
        self._unpark(sequence)
        self._evict(sequence)

    def _unpark(self, sequence: SequenceLayers) -> None:
        del self._parked_bytes[sequence]
        self._trie.unlock(self.parked.pop(sequence))

    def evict_kept(self) -> None:
        """Empties the kept sequence, after it pages out the snapshots that only this sequence holds."""
        self.end = None
        self._evict(self.kept)

    def hand_over_shared(self, sequence: SequenceLayers) -> set[Snapshot]:
        """Makes snapshots that are live in `sequence` live in other sequences that hold the same tokens. Returns the
        snapshots that no other sequence can hold. The kept sequence has claimed its path in `release`."""
        standing = [*self.parked.items(), *((session.sequence, session.node) for session in self.sharing)]
        for other, end in standing:
            if other is not sequence:
                left = sequence.live()
                for node in end.path():
                    resume.make_live(other, node, left)
        return sequence.live()

    def detach_sessions(self) -> None:
        """Detaches the open sessions, which keep their layers, and forgets the other sequences. Called after all
        snapshots are closed."""
        for session in self.sessions:
            session.detached = True
        for sequence in (*self.parked, *([self.kept] if self.idle else [])):
            sequence.discard()
        self.parked.clear()
        self._parked_bytes.clear()
        self.totals.ledger = Ledger()
        self.kept = self.fresh()
        self.end = None

    def _evict(self, sequence: SequenceLayers) -> None:
        self.hand_over_shared(sequence)
        sequence.reset()

    def fresh(self) -> SequenceLayers:
        return SequenceLayers(self.facts, self.totals)
