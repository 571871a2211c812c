"""Sessions over live layers, one at a time."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from runner.cache.interface import Match, PrefixCache, Session
from runner.cache.stack import LayerStack


class LiveSession(Session):
    """A session that writes into the live layers of a stack.

    The record is the prompt and the sampled tokens. During decode the layers run up to one token ahead of it.
    """

    def __init__(
        self, stack: LayerStack, prompt: list[int], match: Match, end: Callable[["LiveSession", bool], None]
    ) -> None:
        """`end(session, failed)` is called once, by the first `close`."""
        self.total = len(prompt)
        self.matched, self.cached, self.miss = match
        self.remaining = prompt[self.cached :]
        self.layers = stack.layers
        self.stack = stack
        self.recorded = prompt
        self.torn = False
        """Whether the cache's own part of a forward broke off: nothing that it holds can be trusted then."""
        self._end: Callable[[LiveSession, bool], None] | None = end
        self._failed = False

    def forward_plan(self, chunk: int) -> Iterator[int]:
        if chunk < 1:
            raise ValueError(f"a prefill chunk of {chunk} tokens")
        return self._lengths(chunk)

    def _lengths(self, chunk: int) -> Iterator[int]:
        at = self.cached
        for stop in (*self._stops(), self.total - 1):
            while at < stop:
                count = min(chunk, stop - at)
                yield count
                at += count

    def _stops(self) -> Iterable[int]:
        """Offsets at which a prefill forward has to end, in order."""
        return ()

    @contextmanager
    def forward(self, count: int) -> Iterator[None]:
        if self._end is None or self._failed:
            raise RuntimeError("a forward in a session that is closed or failed")
        self._failed = self.torn = True
        with self.stack.forward(count):
            self.torn = False
            yield
            self.torn = True
        self._passed(count)
        self._failed = self.torn = False

    def _passed(self, count: int) -> None:
        """The layers have just seen `count` tokens more."""

    def record(self, token: int) -> None:
        self.recorded.append(token)

    def state(self) -> list[mx.array]:
        return self.stack.arrays()

    def close(self, failed: bool = False) -> None:
        end, self._end = self._end, None
        if end is not None:
            end(self, failed or self._failed)


class OneSessionCache(PrefixCache):
    """A prefix cache whose layers one session uses at a time."""

    def __init__(self, make_layers: Callable[[], list[object]]) -> None:
        """`make_layers` gives a fresh cache list, for the same model every time."""
        self._make_layers = make_layers
        self._open = False

    def begin(self, tokens: Sequence[int], salt: str = "") -> Session:
        if not tokens:
            raise ValueError("a session needs a prompt of at least one token")
        self._refuse_while_open()
        prompt = list(tokens)
        session = self._start(prompt, salt)
        self._open = True
        return session

    def clear(self) -> None:
        self._refuse_while_open()
        self._forget()

    @abstractmethod
    def _start(self, prompt: list[int], salt: str) -> LiveSession:
        """A session over layers that stand at the cached prefix; it ends with `_close`."""

    @abstractmethod
    def _keep(self, session: LiveSession, failed: bool) -> None:
        """Keeps what the session computed, or frees it."""

    @abstractmethod
    def _forget(self) -> None:
        """Frees everything."""

    def _close(self, session: LiveSession, failed: bool) -> None:
        self._open = False
        self._keep(session, failed)

    def _refuse_while_open(self) -> None:
        if self._open:
            raise RuntimeError("another session of this cache is open")
