"""Where an answer stands in its grammar."""

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from runner.errors import RequestError
from runner.grammar.messages import Follow, State

_STEP_S = 0.05
_SAVED_S = 5.0
_LATE_S = 1.0  # other processes may have the processor meanwhile


class StateSource(Protocol):
    """Takes one answer through its grammar, elsewhere. One step is on its way at a time."""

    def send(self, step: Follow) -> None:
        """Begin to compute the state behind this step. Raises RequestError if that is impossible."""
        ...

    def receive(self, patience_s: float) -> State | None:
        """That state; None if it is not there within so many seconds. Raises RequestError if it will never be."""
        ...

    def close(self) -> None:
        """The answer has ended."""
        ...


class Grammar(Protocol):
    """What an answer has to follow, compiled."""

    def guide(self) -> "Guide":
        """For the answer. Raises RequestError if it has been given up."""
        ...

    def release(self) -> None:
        """There will be no answer."""
        ...


class Guide:
    """Leads one answer through its grammar: what has to come next, what may, and whether anything does.

    Masks take as long as a grammar makes them, so they are computed elsewhere: after `take` and `restart` the guide can
    only be waited for until its next state has come. An answer may take 50 ms of processor time for each
    token, and what it saves, up to 5 s, for others. Owner: the engine thread.
    """

    def __init__(self, source: StateSource, state: State, size: int) -> None:
        """`state` is the beginning of the answer, `size` that of the vocabulary in tokens."""
        self._source = source
        self._size = size
        self._awaited = 0  # states that are on their way, of which only the last one counts
        self._since_s = 0.0  # when the last one was asked for
        self._spare_s = _SAVED_S
        self._closed = False
        self._enter(state)

    def wait(self, patience_s: float) -> bool:
        """Waits at most `patience_s` for the next state. Returns True once the next token may be asked for."""
        while self._awaited:
            try:
                state = self._source.receive(patience_s)
            except RequestError as error:
                self._fail(str(error))
                break
            if state is not None:
                self._awaited -= 1
                self._spare_s = min(_SAVED_S, self._spare_s + _STEP_S) - state.seconds
            if self._spare_s < 0 or (state is None and monotonic() - self._since_s > self._spare_s + _LATE_S):
                self._fail(f"it takes more than {_STEP_S * 1e3:.0f} ms for each token; make it simpler")
            elif state is None:
                return False
            elif not self._awaited:
                self._enter(state)
        return True

    @property
    def complete(self) -> bool:
        """Whether nothing more may come."""
        return not self._forced and self._complete

    @property
    def fault(self) -> str:
        """Why the answer cannot go on, or nothing."""
        return "" if self._forced else self._error

    @property
    def over(self) -> bool:
        """Whether nothing can come: it is complete, or cannot go on."""
        return self.complete or bool(self.fault)

    def take(self, token: int) -> None:
        """The answer goes on with this token, which may not be one that ends it. If it cannot, `mask` says so."""
        if not self._forced:
            self._send(Follow([token]))
        elif self._forced.popleft() != token:
            self._enter(State(error=f"the grammar has no place for token {token}"))

    def forced(self, most: int) -> list[int]:
        """Goes on with what has to come next, at most so many tokens, and returns them."""
        return [self._forced.popleft() for _ in range(min(most, len(self._forced)))]

    def mask(self) -> bytes:
        """A bit for each token that may come next, those that end the answer included.

        Raises:
            RequestError: the answer cannot go on: no token of the vocabulary may come, the last one might not, or the
                grammar takes too much time or memory to follow.
        """
        if self.fault:
            raise RequestError(self.fault)
        return self._bit(self._forced[0]) if self._forced else self._mask

    def restart(self, tokens: Sequence[int]) -> None:
        """Back to the beginning, and from there along `tokens`."""
        self._send(Follow([*tokens], restart=True))

    def close(self) -> None:
        """The answer has ended. Later calls do nothing."""
        if not self._closed:
            self._closed = True
            self._source.close()

    def _send(self, step: Follow) -> None:
        self._since_s = monotonic()
        try:
            self._source.send(step)
        except RequestError as error:
            self._fail(str(error))
        else:
            self._awaited += 1
            self.wait(0.0)

    def _fail(self, why: str) -> None:
        self._awaited = 0
        self._enter(State(error=f"the answer cannot follow its grammar: {why}"))

    def _enter(self, state: State) -> None:
        self._forced = deque(state.forced)
        self._mask, self._complete, self._error = state.mask, state.complete, state.error

    def _bit(self, token: int) -> bytes:
        mask = bytearray(-(-self._size // 8))
        mask[token // 8] = 1 << token % 8
        return bytes(mask)
