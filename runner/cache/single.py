"""The caches for one session at a time: the kind `single` keeps the last sequence, the kind `none` keeps nothing.

Invariants between sessions: all layers stand at `len(self.tokens)`, and hold exactly these tokens. If the record is
empty, the layers may hold anything: they are reset before their next use.
"""

from collections.abc import Sequence

from runner.cache.interface import PrefixCache
from runner.cache.layer_interface import Match, Miss
from runner.cache.node import common_prefix
from runner.cache.sequence import SequenceLayers, Totals
from runner.cache.session import Session
from runner.cache.sketch import LayerFacts
from runner.logs import Log

log = Log(__name__)


class SingleEntryCache(PrefixCache):
    """A cache of one sequence. The next prompt reuses the prefix that it shares with the last prompt, if every layer
    can go back to the end of this prefix. Otherwise the whole prompt is computed."""

    keeps = True
    paged_bytes = 0

    def __init__(self, facts: LayerFacts) -> None:
        self.facts = facts
        self.totals = Totals()
        self.sequence: SequenceLayers | None = None
        self.tokens: list[int] = []
        """The record between sessions; empty during a session."""
        self._salt = ""
        self._open = False

    @property
    def nbytes(self) -> int:
        return 0 if self.sequence is None else self.sequence.nbytes

    def begin(self, tokens: Sequence[int], salt: str = "", first: int | None = None) -> Session:
        if not tokens:
            raise ValueError("a session needs a prompt of at least one token")
        if self._open:
            raise RuntimeError("another session of this cache is open")
        session = self._open_session(list(tokens), salt)
        session.first = first
        session.forget_first_if_far()
        self._open = True
        return session

    def detach(self) -> None:
        """Frees everything unless a session is open: the cache then holds nothing except this session's layers."""
        if not self._open:
            self.sequence = None
            self.tokens = []

    def session_bytes(self, tokens: int) -> int:
        return self.facts.bytes_of(tokens)

    def _open_session(self, prompt: list[int], salt: str) -> Session:
        """Returns a session over layers that stand at the end of the cached prefix."""
        if self.sequence is None:
            self.sequence = SequenceLayers(self.facts, self.totals)
        match = self._match(prompt, salt)
        # The record is empty until the session closes: after an error it must not claim tokens.
        recorded, self.tokens, self._salt = self.tokens, [], salt
        if match.cached == 0:
            self.sequence.reset()
        elif match.cached < len(recorded):
            refusal = self.sequence.rewind(match.cached)
            if refusal:
                self.sequence.reset()
                log.info("cache freed", why=refusal, matched=match.matched, recorded=len(recorded))
                match = Match(match.matched, 0, refusal)
        return Session(self.sequence, prompt, match, self._close)

    def _match(self, tokens: list[int], salt: str) -> Match:
        if not self.keeps:
            return Match(0, 0, Miss.OFF)
        if not self.tokens:
            return Match(0, 0, Miss.EMPTY)
        if salt != self._salt:
            return Match(0, 0, Miss.SALT)
        matched = common_prefix(tokens, self.tokens)
        # The last token is always evaluated again: the first logits come from it.
        cached = min(matched, len(tokens) - 1)
        return Match(matched, cached, Miss.NONE if matched else Miss.NO_COMMON_PREFIX)

    def _close(self, session: Session) -> None:
        self._open = False
        session.sequence.measure()
        self._release(session)

    def _release(self, session: Session) -> None:
        """Keeps the tokens of the session in the layers and the record, or frees them."""
        sequence = session.sequence
        if not self.keeps:
            sequence.reset()
            self.sequence = None
            return
        if session.failed:
            self._reset(sequence, "a forward failed")
            if session.cache_invalid:
                self.sequence = None
            return
        # The layers may be ahead of the record by a token that was never read, or behind it by tokens that were never
        # computed.
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


class NullCache(SingleEntryCache):
    """Makes fresh layers for every session, and frees them when the session ends."""

    keeps = False
