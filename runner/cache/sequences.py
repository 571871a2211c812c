"""The sequences of layers over one trie: one for each open session, and one kept between sessions.

Invariants: the live snapshots of a sequence lie on the path to where it stands, or beyond and not yet overwritten;
the kept sequence stands at `end` while no session uses it. `end` is None at the root, and while a session uses it.
"""

from collections.abc import Callable

from runner.cache import resume
from runner.cache.layer_interface import Snapshot
from runner.cache.layers.snapshot import Ledger
from runner.cache.node import Node
from runner.cache.sequence import LayerFacts, SequenceLayers
from runner.cache.session import TrieSession


class LiveSequences:
    """Assigns layers to sessions. A session detached from the trie stays listed until it closes, but shares nothing."""

    def __init__(self, make_layers: Callable[[], list[object]]) -> None:
        """`make_layers` returns a fresh cache list of the same model every time."""
        self._make_layers = make_layers
        self.facts = LayerFacts()
        self.sessions: list[TrieSession] = []
        self.kept = self.fresh()
        self.end: Node | None = None
        self._untrusted_known = 0

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
        """The sequences of open sessions, and the kept one."""
        return {self.kept, *(session.sequence for session in self.sessions)}

    @property
    def layer_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(sequence.nbytes for sequence in self.all)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, and of the snapshots that own theirs."""
        return self.layer_bytes + self.facts.ledger.nbytes

    def flush(self) -> None:
        """Evaluates the pending copies of nodes that were split or joined. Raises what MLX raises."""
        self.facts.ledger.flush()

    def acquire(self) -> tuple[SequenceLayers, Node | None]:
        """Returns layers for a session, and the node where they stand: the kept sequence if it is idle, a fresh one
        otherwise."""
        if not self.idle:
            return self.fresh(), None
        end, self.end = self.end, None
        return self.kept, end

    def release(self, sequence: SequenceLayers, end: Node) -> None:
        """Takes back a session's layers, which stand at `end`: they are kept, and the idle sequence kept before is
        evicted."""
        former, idle = self.kept, self.idle
        self.kept = sequence
        self.end = end
        for node in end.path():
            resume.make_live(sequence, node)  # so that no snapshots of two sequences are joined, which would copy them
        if idle and former is not sequence:
            self._evict(former)

    def evict_kept(self) -> None:
        """Pages out what only the kept sequence holds, and empties it."""
        self.end = None
        self._evict(self.kept)

    def hand_over_shared(self, sequence: SequenceLayers) -> set[Snapshot]:
        """Makes the snapshots that other sessions hold too live in their layers, and returns those that only `sequence`
        holds. The kept sequence has claimed all of its path before."""
        for session in self.sharing:
            if session.sequence is not sequence:
                left = sequence.live()
                for node in session.node.path():
                    resume.make_live(session.sequence, node, left)
        return sequence.live()

    def detach_sessions(self) -> None:
        """Detaches the open sessions, which keep their layers, and forgets the kept sequence. No snapshot may be open
        any more."""
        for session in self.sessions:
            session.detached = True
        if self.idle:
            self.kept.discard()
        self.facts.ledger = Ledger()
        self.kept = self.fresh()
        self.end = None

    def replace_untrusted(self) -> bool:
        """Returns True if layers have proved untrusted since the last call. All sequences have replaced their adapters
        then."""
        known, self._untrusted_known = self._untrusted_known, len(self.facts.untrusted)
        if known == self._untrusted_known:
            return False
        for sequence in self.all:
            sequence.replace_untrusted()
        return True

    def _evict(self, sequence: SequenceLayers) -> None:
        self.hand_over_shared(sequence)
        sequence.reset()

    def fresh(self) -> SequenceLayers:
        """Returns new layers."""
        return SequenceLayers(self._make_layers(), self.facts)
