"""The cache kind `single`: the layers keep the last sequence, and the next prompt reuses the prefix they share.

Invariants between sessions: all layers stand at `len(self.tokens)`, and hold exactly these tokens. An empty record
says nothing about the layers; they are reset before use.
"""

from collections.abc import Callable

from protocol.stats import CacheNode
from runner.cache.interface import CacheDescription, Match, Miss, Spell
from runner.cache.prefix import common_prefix
from runner.cache.report import describe_sequence, sequence_node
from runner.cache.sequence import SequenceLayers
from runner.cache.session import LiveSession, OneSessionCache
from runner.logs import Log

log = Log(__name__)


class SingleEntryCache(OneSessionCache):
    """A cache of one sequence. It goes back to an earlier token if every layer can; otherwise it computes everything
    again."""

    def __init__(self, make_layers: Callable[[], list[object]]) -> None:
        super().__init__(make_layers)
        self.sequence: SequenceLayers | None = None
        self.tokens: list[int] = []
        self._salt = ""

    @property
    def nbytes(self) -> int:
        return 0 if self.sequence is None else self.sequence.nbytes

    def describe(self) -> CacheDescription:
        return describe_sequence(self._facts, self.sequence, len(self.tokens), self._open)

    def nodes(self, spell: Spell | None = None, most: int = 1000) -> list[CacheNode]:  # noqa: ARG002  at most one
        return sequence_node(self._facts, self.sequence, self.tokens, spell)

    def _open_session(self, prompt: list[int], salt: str) -> LiveSession:
        if self.sequence is None:
            self.sequence = SequenceLayers(self._make_layers(), self._facts)
        match = self._match(prompt, salt)
        # The session owns the record until it closes: if anything goes wrong in between, the record claims nothing.
        recorded, self.tokens, self._salt = self.tokens, [], salt
        if match.cached == 0:
            self.sequence.reset()
        elif match.cached < len(recorded):
            refusal = self.sequence.rewind(match.cached)
            if refusal:
                self.sequence.reset()
                log.info("cache freed", why=refusal, matched=match.matched, recorded=len(recorded))
                match = Match(match.matched, 0, refusal)
        return LiveSession(self.sequence, prompt, match, self._close)

    def _match(self, tokens: list[int], salt: str) -> Match:
        if not self.tokens:
            return Match(0, 0, Miss.EMPTY)
        if salt != self._salt:
            return Match(0, 0, Miss.SALT)
        matched = common_prefix(tokens, self.tokens)
        # One token is always evaluated again: the first logits come from it.
        cached = min(matched, len(tokens) - 1)
        return Match(matched, cached, Miss.NONE if matched else Miss.NO_COMMON_PREFIX)

    def _release(self, session: LiveSession, failed: bool) -> None:
        sequence = session.sequence
        if failed:
            self._reset(sequence, "a forward failed")
            return
        # The layers may be ahead of the record by a token that was never read, or behind it by tokens never computed.
        reached = min(sequence.offset, len(session.recorded))
        refusal = sequence.rewind(reached)
        if refusal:
            self._reset(sequence, f"the layers cannot be levelled to {reached} tokens ({refusal})")
            return
        try:
            sequence.evaluate()
        except Exception as error:
            self._reset(sequence, f"its state cannot be computed: {error}")
            return
        self.tokens = session.recorded[:reached]

    def _reset(self, sequence: SequenceLayers, why: str) -> None:
        log.warning("cache freed", why=why)
        sequence.reset()

    def _free(self) -> None:
        self.sequence, self.tokens = None, []


# --- The cache kind `none`: every prompt is computed from its first token.


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
