"""The cache kind `none`: every prompt is computed from its first token."""

from protocol.stats import CacheNode
from runner.cache.interface import CacheDescription, Match, Miss, Spell
from runner.cache.report import describe_sequence, sequence_node
from runner.cache.sequence import SequenceLayers
from runner.cache.session import LiveSession, OneSessionCache


class NullCache(OneSessionCache):
    """Makes fresh layers for every session and frees them when it ends."""

    sequence: SequenceLayers | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.sequence is None else self.sequence.nbytes

    def describe(self) -> CacheDescription:
        return describe_sequence(self._facts, self.sequence, 0, self._open)

    def nodes(self, spell: Spell | None = None, most: int = 1000) -> list[CacheNode]:  # noqa: ARG002  at most one
        return sequence_node(self._facts, self.sequence, (), spell)

    def _open_session(self, prompt: list[int], salt: str) -> LiveSession:  # noqa: ARG002  nothing is shared
        self.sequence = SequenceLayers(self._make_layers(), self._facts)
        return LiveSession(self.sequence, prompt, Match(0, 0, Miss.OFF), self._close)

    def _release(self, session: LiveSession, failed: bool) -> None:  # noqa: ARG002  freed either way
        session.sequence.reset()
        self._free()

    def _free(self) -> None:
        self.sequence = None
