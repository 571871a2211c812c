"""Sessions that write into live layers, and the base of the caches that have one session at a time."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from runner.cache.interface import Cache, Match, Session
from runner.cache.layer_facts import LayerFacts
from runner.cache.sequence import SequenceLayers, SequenceMark
from runner.logs import Log

log = Log(__name__)
_NOT_READY = "a forward in a session that is closed or failed, or has a round to accept"


class LiveSession(Session):
    """A session over one sequence of layers.

    Its record is the prompt and the sampled tokens. While decoding, the layers are up to one token ahead of it.

    A *round* is a forward over several tokens of the answer at once, of which only the first ones may prove right:

        with session.draft_round(n):            # the token that is next anyway, and n - 1 drafts of those after it
            logits = model(tokens, session.layers)
        ...                                     # find out that the first m tokens are right
        if not session.accept(m):               # True: the session stands behind these m tokens
            ...                                 # False: it stands where it did; compute these m once more

    Until `accept` the session stands where it did before, whatever its layers hold. Tokens that are computed once more
    are a round if they are several, which is then accepted as a whole, and may have further drafts behind them. Drafts
    are recorded once they are known to be right, before `accept` or after it.
    """

    def __init__(
        self, sequence: SequenceLayers, prompt: list[int], match: Match, end: Callable[["LiveSession", bool], None]
    ) -> None:
        """The first `close` calls `end(session, failed)`."""
        self.total = len(prompt)
        self.matched, self.cached, self.miss = match
        self.layers = sequence.layers
        self.sequence = sequence
        self.recorded = prompt
        self.cache_invalid = False
        """True if the cache's own part of a forward was interrupted: nothing in the cache can be trusted then."""
        self.known: list[int] = []
        """The first tokens of the answer, which need not be drawn, as far as they are not recorded yet. While there are
        any, the layers may have seen more tokens than are recorded. `end_known` before anything is computed."""
        self.due = 0
        """The position from which on `_passed` is called after forwards of a single token, too."""
        self._end: Callable[[LiveSession, bool], None] | None = end
        self._ready = True  # neither closed nor in a round
        self._mark: SequenceMark | None = None  # of the round that has to be accepted
        self._failed = False
        self._evicted_bytes = sequence.facts.evicted_bytes

    @property
    def failed(self) -> bool:
        """True if a forward was interrupted: nothing in the session's layers can be trusted then."""
        return self._failed

    @property
    def evicted_bytes(self) -> int:
        """Bytes that the cache has evicted since the session began, for any session."""
        return self.sequence.facts.evicted_bytes - self._evicted_bytes

    @property
    def position(self) -> int:
        return self.sequence.position

    @property
    def in_round(self) -> bool:
        """True if a round has to be accepted before anything else is computed."""
        return self._mark is not None

    def round_bytes(self, count: int) -> int:
        """Returns the bytes that a round over `count` tokens would take until it is accepted, in addition to its
        forward and to the layers: what these can go back to. Raises as `draft_round` does."""
        return self.sequence.mark(count).nbytes

    def next_forward(self, most: int) -> int:
        if most < 1:
            raise ValueError(f"a prefill forward of {most} tokens")
        stop = min(len(self.recorded) - 1, self._next_checkpoint() or len(self.recorded))
        return max(0, min(most, stop - self.position))

    def _next_checkpoint(self) -> int | None:
        """Returns the next offset at which a prefill forward has to end, or None."""
        return None

    @contextmanager
    def forward(self, count: int) -> Iterator[None]:
        if not self._ready or self._failed:
            raise RuntimeError(_NOT_READY)
        self._failed = self.cache_invalid = True
        self.sequence.page_out()
        self.cache_invalid = False
        yield
        self.cache_invalid = True
        distrusted = self.sequence.advance(count)
        if count > 1 or distrusted or self.sequence.position >= self.due:
            self._passed(count, stepwise=count == 1)
        self._failed = self.cache_invalid = False

    @contextmanager
    def draft_round(self, count: int) -> Iterator[None]:
        """Surrounds the call of the model over the next `count` tokens, at least 2, as `forward` does; `accept` has to
        follow. Raises ValueError for fewer tokens, and TypeError unless `sequence.markable`."""
        if not self._ready or self._failed:
            raise RuntimeError(_NOT_READY)
        mark = self.sequence.mark(count)
        self._failed = self.cache_invalid = True
        self.sequence.page_out()
        self.cache_invalid = self._ready = False
        with mark.watched():
            yield
        self._mark = mark
        self._failed = False

    def accept(self, count: int) -> bool:
        """Ends a round, of which the first `count` tokens are right. Returns True if the session stands behind these
        now, as if they had been computed one by one; False if a layer cannot, and it stands where it did before.

        Raises RuntimeError if there is no round to end, and ValueError if it has fewer tokens.
        """
        mark = self._mark
        if mark is None:
            raise RuntimeError("no round to accept")
        if not 0 <= count <= mark.length:
            raise ValueError(f"{count} of the {mark.length} tokens of a round")
        self._mark = None
        self._failed = self.cache_invalid = True
        distrusted = self.sequence.advance(mark.length)
        self.sequence.revert(mark, mark.position + count)
        passed = self.position - mark.position
        if distrusted or self.position >= self.due:
            self._passed(passed, stepwise=True)
        self._failed = self.cache_invalid = False
        self._ready = True
        return passed == count

    def absorb(self, batch_caches: Sequence[object], row: int, count: int) -> None:
        """Takes over what the last `count` tokens left in a row of a batch, given its layers."""
        with self.forward(count):
            self.sequence.absorb(batch_caches, row, count)
            self.sequence.evaluate()  # an unevaluated slice would keep the whole batch alive

    def _passed(self, count: int, *, stepwise: bool) -> None:
        """Follows a forward over `count` tokens, or, if `stepwise`, as many steps of one token each. Called only when
        there may be something to do: after a forward over several tokens, after one that reaches `due`, and after one
        that shows a layer to be untrusted."""

    def continuation(self, most: int) -> list[int]:  # noqa: ARG002
        """Returns up to `most` tokens that followed all recorded ones in another conversation; pictures end them."""
        return []

    def end_known(self) -> None:
        """Forgets the rest of the known tokens: the layers have not seen the last recorded token any more."""
        self.known = []

    def record(self, token: int) -> None:
        self.recorded.append(token)

    def state(self) -> list[mx.array]:
        return self.sequence.arrays()

    def close(self, failed: bool = False) -> None:
        end, self._end = self._end, None
        if end is None:
            return
        mark = self._mark
        if mark is not None and not failed:
            try:
                # What is recorded behind the first token need not be the drafts that the layers hold there.
                self.accept(int(len(self.recorded) > mark.position))
            except Exception:
                log.exception("a round could not be taken back")
        self._mark, self._ready = None, False
        end(self, failed or self._failed)


class OneSessionCache(Cache):
    """A cache whose layers are used by one session at a time."""

    def __init__(self, make_layers: Callable[[], list[object]]) -> None:
        """`make_layers` returns a fresh cache list of the same model every time."""
        self._make_layers = make_layers
        self._facts = LayerFacts()
        self._open = False

    def begin(self, tokens: Sequence[int], salt: str = "") -> Session:
        if not tokens:
            raise ValueError("a session needs a prompt of at least one token")
        self._refuse_while_open()
        prompt = list(tokens)
        session = self._open_session(prompt, salt)
        self._open = True
        return session

    def session_bytes(self, tokens: int) -> int:
        return self._facts.bytes_of(tokens)

    def clear(self) -> None:
        self._refuse_while_open()
        self._free()

    @abstractmethod
    def _open_session(self, prompt: list[int], salt: str) -> LiveSession:
        """Returns a session over layers that stand at the cached prefix. It ends with `_close`."""

    @abstractmethod
    def _release(self, session: LiveSession, failed: bool) -> None:
        """Stores what the session computed, or frees it."""

    @abstractmethod
    def _free(self) -> None:
        """Frees everything."""

    def _close(self, session: LiveSession, failed: bool) -> None:
        self._open = False
        session.sequence.measure()
        self._release(session, failed)

    def _refuse_while_open(self) -> None:
        if self._open:
            raise RuntimeError("another session of this cache is open")
