"""The sequences of layers over one trie: one for each open session, and several between sessions.

The sequence that was released last is `kept`. Sequences released before it are `parked`, as long as there are no more
than there were sessions at once: conversations that take turns go on where they stand, and nothing is copied.

Invariants: the live snapshots of a sequence lie on the path to its node, or beyond and not yet overwritten; the kept
sequence stands at `end` while no session uses it. `end` is None at the root, and while a session uses it. A parked
sequence stands at its node, which is locked.
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
    """Assigns layers to sessions. A session detached from the trie stays listed until it closes, but shares nothing."""

    def __init__(self, facts: LayerFacts, trie: PrefixTrie) -> None:
        self.facts = facts
        self.totals = Totals()
        self._trie = trie
        self.sessions: list[TrieSession] = []
        self.kept = self.fresh()
        self.end: Node | None = None
        self.parked: dict[SequenceLayers, Node] = {}
        """Sequences that were kept before, least recently used first, each with the node where it stands."""
        self._parked_bytes: dict[SequenceLayers, int] = {}  # of their layers: counting them takes 70 us for each
        self._most = 1  # the most sessions that were open at once

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
        """The sequences of open sessions, the kept one and the parked ones."""
        return {self.kept, *self.parked, *(session.sequence for session in self.sessions)}

    @property
    def layer_bytes(self) -> int:
        """Bytes of all layers."""
        running = (sequence.nbytes for sequence in self.all if sequence not in self.parked)
        return sum(self._parked_bytes.values()) + sum(running)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, and of the snapshots that own theirs."""
        return self.layer_bytes + self.totals.ledger.nbytes

    def flush(self) -> None:
        """Evaluates the pending copies of nodes that were split or joined. Raises what MLX raises."""
        self.totals.ledger.flush()

    def choose(self, path: Sequence[Node], matched: int) -> tuple[SequenceLayers | None, Node | None]:
        """Returns the sequence for a session whose prompt begins with the first `matched` tokens of this path, and the
        node where it stands; None for a fresh sequence. A prompt that continues a conversation gets the layers of that;
        any other gets the layers that have been idle for longest, once there are enough."""
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
        """Returns layers for a session that is about to open, as `choose` does."""
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
        """Keeps a session's layers, which stand at `end`. Parks the idle sequence kept before, or evicts it if others
        hold most of its tokens, too."""
        former, former_end, idle = self.kept, self.end, self.idle
        self.kept = sequence
        self.end = end
        for node in end.path():
            resume.make_live(sequence, node)  # to join snapshots of two sequences would copy them
        if idle and former is not sequence:
            if former_end is not None and self._is_mostly_its_own(former_end):
                self.parked[former] = former_end
                self._parked_bytes[former] = former.nbytes
                self._trie.lock(former_end)
            else:
                self._evict(former)

    def _is_mostly_its_own(self, end: Node) -> bool:
        """Returns True if a sequence that stands at `end` shares less than half of its tokens with any other one."""
        held = set(self.end.path()) if self.end else set[Node]()
        return 2 * max(node.end for node in end.path() if node.locks or node in held or node.parent is None) < end.end

    def evict_parked(self) -> None:
        """Pages out the snapshots that only the least recently used parked sequence holds, and empties it."""
        sequence = next(iter(self.parked))
        self._unpark(sequence)
        self._evict(sequence)

    def _unpark(self, sequence: SequenceLayers) -> None:
        del self._parked_bytes[sequence]
        self._trie.unlock(self.parked.pop(sequence))

    def evict_kept(self) -> None:
        """Pages out the snapshots that only the kept sequence holds, and empties it."""
        self.end = None
        self._evict(self.kept)

    def hand_over_shared(self, sequence: SequenceLayers) -> set[Snapshot]:
        """Makes snapshots that other sequences hold, too, live in their layers, and returns the snapshots that only
        `sequence` holds. The kept sequence has claimed all of its path before."""
        standing = [*self.parked.items(), *((session.sequence, session.node) for session in self.sharing)]
        for other, end in standing:
            if other is not sequence:
                left = sequence.live()
                for node in end.path():
                    resume.make_live(other, node, left)
        return sequence.live()

    def detach_sessions(self) -> None:
        """Detaches the open sessions, which keep their layers, and forgets the other sequences. No snapshot may be open
        any more."""
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
