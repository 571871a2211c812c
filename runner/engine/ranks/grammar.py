"""Grammars between ranks: the leader follows them, and tells its followers each state."""

from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from runner.engine.tape.grammar import attempt
from runner.engine.tape.interface import Tape, Value, What
from runner.errors import RequestError
from runner.grammar import Grammar, Guide
from runner.grammar.messages import Follow, State

if TYPE_CHECKING:
    from runner.grammar.guide import StateSource

_begun = msgspec.msgpack.Decoder(tuple[State, int])
_state = msgspec.msgpack.Decoder(State)


class RankGrammar:
    """The compiled grammar of a request, on the leader; what stands for it, on a follower. Owner: the engine thread."""

    def __init__(self, grammar: Grammar | None, tape: Tape) -> None:
        """`grammar` is None on a follower, whose tape has all that it says."""
        self._grammar, self._tape = grammar, tape

    def guide(self) -> Guide:
        """Returns the guide. Raises RequestError if there is none any more."""
        own: Guide | None = None

        def look() -> Value:
            nonlocal own
            assert self._grammar is not None
            try:
                own = self._grammar.guide()
            except RequestError as error:
                return str(error)
            return msgspec.msgpack.encode((own.state, own.size))

        told = self._tape.of(What.GRAMMAR, look)
        if not isinstance(told, bytes):
            raise RequestError(str(told))
        guide = own or Guide(_Source(None, self._tape), *_begun.decode(told))
        guide.watch(
            lambda source: _Source(source, self._tape) if own else source,
            lambda: self._tape.of(What.SECONDS, monotonic),
        )
        return guide

    def release(self) -> None:
        """Gives the grammar back without an answer."""
        if self._grammar is not None:
            self._grammar.release()


class _Source:
    """The states of a grammar: the leader's come from where it follows the grammar, a follower's from the tape."""

    def __init__(self, source: "StateSource | None", tape: Tape) -> None:
        self._source, self._tape = source, tape

    def send(self, step: Follow) -> None:
        source = self._source
        attempt(self._tape, lambda: source.send(step) if source is not None else None)

    def receive(self, patience_s: float) -> State | None:
        def look() -> Value:
            assert self._source is not None
            try:
                state = self._source.receive(patience_s)
            except RequestError as error:
                return str(error)
            return None if state is None else msgspec.msgpack.encode(state)

        told = self._tape.of(What.STATE, look)
        if isinstance(told, str):
            raise RequestError(told)
        return _state.decode(told) if isinstance(told, bytes) else None

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
