"""Follows an answer through its grammar: the present position, and the states that later positions are read from."""

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import msgspec

from runner.errors import RequestError
from runner.grammar.messages import Follow, State

if TYPE_CHECKING:
    from runner.engine.answer_grammar import StateTape

_STEP_S = 0.05
_SAVED_S = 5.0
_LATE_S = 1.0  # the additional time on the clock, since other processes use the processor


class StateSource(Protocol):
    """Computes the states of one answer, usually in another process. Only one step may be in flight at a time."""

    def send(self, step: Follow) -> None:
        """Starts to compute the state after `step`. Raises RequestError if that is impossible."""
        ...

    def receive(self, patience_s: float) -> State | None:
        """Returns the state after that step; None after `patience_s` without it. Raises RequestError if it failed."""
        ...

    def close(self) -> None:
        """Ends the use of the source for this answer."""
        ...


class Guide:
    """Follows one answer through its grammar.

    Computing a mask may take long, so a source computes the states, usually in another process. After `take` or
    `restart`, call `wait` until the next state has come. An answer may use 50 ms of processor time for each token;
    unused time, up to 5 s, is saved for later tokens. The port `Guidance` explains the methods. Owner: the engine
    thread.
    """

    def __init__(self, source: StateSource, state: State, size: int, clock: Callable[[], float] = monotonic) -> None:
        """Starts at the beginning of the answer, `state`. The vocabulary has `size` tokens; `clock` returns seconds."""
        self.source = source
        """The source of all states after the first one."""
        self._clock = clock
        self.size = size
        self._awaited = 0  # the number of states in flight; all but the last are skipped
        self._since_s = 0.0  # the time at which the last state was requested
        self._spare_s = _SAVED_S
        self._granted_s = 0.0  # the processor time allowed for the tokens in flight
        self._tried: list[bytes | int] = []  # the result of the latest look ahead
        self._closed = False
        self._enter(state)

    def wait(self, patience_s: float) -> bool:
        while self._awaited:
            try:
                state = self.source.receive(patience_s)
            except RequestError as error:
                self._fail(str(error))
                break
            if state is not None:
                self._awaited -= 1
                if state.tried is not None:  # the drafter asked for it, so the answer does not pay for its time
                    self._tried = state.tried
                    self._since_s = self._clock()
                    continue
                self._spare_s = min(_SAVED_S, self._spare_s + self._granted_s) - state.seconds
                self._granted_s = 0.0
            if self._spare_s < 0 or (state is None and self._clock() - self._since_s > self._spare_s + _LATE_S):
                self._fail(f"it takes more than {_STEP_S * 1e3:.0f} ms for each token; make it simpler")
            elif state is None:
                return False
            elif not self._awaited:
                self._enter(state)
        return True

    @property
    def state(self) -> State:
        """The present position, in the form in which a source sends states."""
        return State([*self._forced], self._mask, self._complete, self._error)

    @property
    def complete(self) -> bool:
        return not self._forced and self._complete

    @property
    def fault(self) -> str:
        return "" if self._forced else self._error

    def take(self, *tokens: int) -> None:
        for at, token in enumerate(tokens):
            if not self._forced:
                self._send(Follow([*tokens[at:]]))
                return
            if self._forced.popleft() != token:
                self._enter(State(error=f"the grammar does not allow token {token}"))
                return

    def look_ahead(self, tokens: Sequence[int], patience_s: float) -> list[bytes | int]:
        forced = [*self._forced]
        ahead: list[bytes | int] = []
        for at, token in enumerate(tokens[: len(forced)]):
            if token != forced[at]:
                return ahead
            ahead.append(forced[at + 1] if at + 1 < len(forced) else self._mask)
        if len(ahead) < len(forced):
            return ahead
        if self._complete or self._error:
            return ahead[:-1]
        if self._awaited or len(ahead) == len(tokens):
            return ahead
        self._tried = []
        self._send(Follow([*tokens[len(ahead) :]], tries=True))
        self.wait(patience_s)
        return ahead + self._tried

    def forced(self, most: int) -> list[int]:
        return [self._forced.popleft() for _ in range(min(most, len(self._forced)))]

    def mask(self) -> bytes:
        if self.fault:
            raise RequestError(self.fault)
        return self.bit(self._forced[0]) if self._forced else self._mask

    def bit(self, token: int) -> bytes:
        mask = bytearray(-(-self.size // 8))
        mask[token // 8] = 1 << token % 8
        return bytes(mask)

    def restart(self, tokens: Sequence[int]) -> None:
        self._send(Follow([*tokens], restart=True))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.source.close()

    def _send(self, step: Follow) -> None:
        self._since_s = self._clock()
        try:
            self.source.send(step)
        except RequestError as error:
            self._fail(str(error))
        else:
            self._awaited += 1
            self._granted_s += 0.0 if step.tries else _STEP_S * len(step.tokens)
            self.wait(0.0)

    def _fail(self, why: str) -> None:
        self._awaited = 0
        self._enter(State(error=f"the answer cannot follow its grammar: {why}"))

    def _enter(self, state: State) -> None:
        self._forced = deque(state.forced)
        self._mask = state.mask
        self._complete = state.complete
        self._error = state.error


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(State).decode


def taped_guide(tape: "StateTape | None", begin: Callable[[], Guide | None], size: int) -> Guide | None:
    """Returns the guide that `begin` makes. A tape records the states of the guide. If the tape plays back, it supplies
    the states instead: `begin` is not called, and `size` is the size of the vocabulary."""
    if tape is None:
        return begin()
    own: Guide | None = None

    def beginning() -> bytes | None:
        nonlocal own
        own = begin()
        return None if own is None else _encode(own.state)

    body = tape.beginning(beginning)
    if body is None:
        return None
    size = size if own is None else own.size
    source = _TapedSource(tape, None if own is None else own.source, size)
    return Guide(source, decode_state(body, size), size, tape.clock)


class _TapedSource:
    """Records the states of one answer, or plays them back: when each came, its processor time, and its bytes."""

    def __init__(self, tape: "StateTape", source: StateSource | None, size: int) -> None:
        self._tape = tape
        self._source = source
        self._size = size

    def send(self, step: Follow) -> None:
        self._tape.send(lambda: self._source.send(step) if self._source else None)

    def receive(self, patience_s: float) -> State | None:
        def receive() -> tuple[float, bytes] | None:
            assert self._source is not None
            if (state := self._source.receive(patience_s)) is None:
                return None
            return state.seconds, _encode(msgspec.structs.replace(state, seconds=0.0, nbytes=0))

        if (found := self._tape.receive(receive)) is None:
            return None
        seconds, body = found
        return msgspec.structs.replace(decode_state(body, self._size), seconds=seconds)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def decode_state(body: bytes, size: int) -> State:
    """Returns the state in the bytes `body` of a tape. Raises ValueError if the state has a token beyond the `size` of
    the vocabulary: anybody may have made the file."""
    state = _decode(body)
    tokens = [*state.forced, *(each for each in state.tried or () if isinstance(each, int))]
    if not all(0 <= token < size for token in tokens):
        raise ValueError("a grammar names a token that the model does not have")
    return state
