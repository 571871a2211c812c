"""The stacks of layers over one trie: one for each open session, and between sessions one that is kept.

Invariants: what is live in the layers of a stack lies on the path to where it stands, or behind that and not yet
overwritten; the kept one, while no session uses it, stands at `end`; None stands for the root, and for its being used.
"""

from collections.abc import Callable

from runner.cache import resume
from runner.cache.layer_facts import LayerFacts
from runner.cache.layer_interface import Snapshot
from runner.cache.layers.snapshot import Ledger
from runner.cache.sequence import SequenceLayers
from runner.cache.trie import Node
from runner.cache.trie_session import TrieSession


class LiveSequences:
    """Who has which layers. A session whose trie was given up is among them until it closes, but shares nothing."""

    def __init__(self, make_layers: Callable[[], list[object]]) -> None:
        """`make_layers` gives a fresh cache list, for the same model every time."""
        self._make_layers = make_layers
        self.facts = LayerFacts()
        self.sessions: list[TrieSession] = []
        self.kept = self._fresh()
        self.end: Node | None = None
        self._untrusted_known = 0

    @property
    def idle(self) -> bool:
        """Whether no session uses the kept stack."""
        return all(session.sequence is not self.kept for session in self.sessions)

    @property
    def sharing(self) -> list[TrieSession]:
        """The open sessions that go along the trie."""
        return [session for session in self.sessions if not session.detached]

    @property
    def all(self) -> set[SequenceLayers]:
        """Those of open sessions, and the kept one."""
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
        """Computes what was put off when nodes were cut and joined. Raises what MLX raises."""
        self.facts.ledger.flush()

    def acquire(self) -> tuple[SequenceLayers, Node | None]:
        """A stack for a session, and where it stands: the kept one if it is free."""
        if not self.idle:
            return self._fresh(), None
        end, self.end = self.end, None
        return self.kept, end

    def release(self, sequence: SequenceLayers, end: Node) -> None:
        """A session has left this stack, standing at `end`: it is kept, and the one that was kept before given up."""
        former, idle = self.kept, self.idle
        self.kept, self.end = sequence, end
        for node in end.path():
            resume.claim_live(sequence, node)  # lest what is live in two stacks is joined by copying it
        if idle and former is not sequence:
            self._evict(former)

    def evict_kept(self) -> None:
        """What the kept stack holds is copied out, as far as no other one holds it too."""
        self.end = None
        self._evict(self.kept)

    def hand_over_shared(self, sequence: SequenceLayers) -> set[Snapshot]:
        """What is live in a stack and held by no other: what others hold is live there from now on. The kept one has
        claimed all of its path before."""
        for session in self.sharing:
            if session.sequence is not sequence:
                left = sequence.live()
                for node in session.node.path():
                    resume.claim_live(session.sequence, node, left)
        return sequence.live()

    def detach_sessions(self) -> None:
        """Forgets what is kept; open sessions go on with their layers. No snapshot may be open any more."""
        for session in self.sessions:
            session.detached = True
        if self.idle:
            self.kept.discard()
        self.facts.ledger = Ledger()
        self.kept, self.end = self._fresh(), None

    def check_trust(self) -> bool:
        """Whether layers turned out not to be trusted since the last call; every stack knows of them then."""
        known, self._untrusted_known = self._untrusted_known, len(self.facts.untrusted)
        if known == self._untrusted_known:
            return False
        for sequence in self.all:
            sequence.replace_untrusted()
        return True

    def _evict(self, sequence: SequenceLayers) -> None:
        self.hand_over_shared(sequence)
        sequence.reset()

    def _fresh(self) -> SequenceLayers:
        return SequenceLayers(self._make_layers(), self.facts)
