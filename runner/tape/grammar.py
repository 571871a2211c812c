"""Grammars on a tape: when their states come is an input, what the states say follows."""

from collections.abc import Callable
from math import inf
from time import monotonic
from zlib import crc32

import msgspec

from runner.engine.guide import Follow, Grammar, Guide, State, StateSource
from runner.engine.ports import Tape, Value, What
from runner.errors import RequestError
from runner.tape.recorder import Player


def attempt(tape: Tape, act: Callable[[], object]) -> None:
    """Does `act`, unless the tape is read: then it was done when that was written. Raises RequestError if it does, or
    did."""

    def look() -> str | None:
        try:
            act()
        except RequestError as error:
            return str(error)
        return None

    if (fault := tape.of(What.GRAMMAR, look)) is not None:
        raise RequestError(fault)


class TapedGrammar:
    """A compiled grammar whose guide stands on the tape. Owner: the engine thread."""

    def __init__(self, grammar: Grammar, tape: Tape) -> None:
        self._grammar, self._tape = grammar, tape

    def guide(self) -> Guide:
        """Returns the guide. Raises RequestError if there is none any more."""
        guides: list[Guide] = []
        attempt(self._tape, lambda: guides.append(self._grammar.guide()))
        guide = guides[0] if guides else self._grammar.guide()
        guide.watch(lambda source: _TapedSource(source, self._tape), lambda: self._tape.of(What.SECONDS, monotonic))
        return guide

    def release(self) -> None:
        """Gives the grammar back without an answer."""
        self._grammar.release()


class _TapedSource:
    """The states of a grammar: on the tape stands when each came, what it took, and a checksum."""

    def __init__(self, source: StateSource, tape: Tape) -> None:
        self._source, self._tape = source, tape

    def send(self, step: Follow) -> None:
        attempt(self._tape, lambda: self._source.send(step))
        if isinstance(self._tape, Player):
            self._source.send(step)

    def receive(self, patience_s: float) -> State | None:
        state: State | None = None

        def look() -> Value:
            nonlocal state
            try:
                state = self._source.receive(patience_s)
            except RequestError as error:
                return str(error)
            return None if state is None else _note(state)

        note = self._tape.of(What.STATE, look)
        if isinstance(note, str):
            raise RequestError(note)
        if isinstance(self._tape, Player) and isinstance(note, list):
            return self._replayed(note, self._tape)
        return state

    def _replayed(self, note: list[Value], tape: Player) -> State:
        """Returns the state that the tape describes."""
        seconds, count, error, _ = note
        if error:  # of the worker, which had its limits
            return State(error=str(error), seconds=float(str(seconds)))
        found = self._source.receive(inf)
        if found is None:
            raise tape.differs(What.STATE, note, "no state")
        tried = found.tried[: int(str(count))] if found.tried is not None else None
        found = msgspec.structs.replace(found, seconds=float(str(seconds)), tried=tried)
        if _note(found) != note:
            raise tape.differs(What.STATE, note, f"state {_note(found)}")
        return found

    def close(self) -> None:
        self._source.close()


def _note(state: State) -> list[Value]:
    """Returns the time that a state took, the number of tokens that were tried (-1 for none), its error, and a checksum
    of all that it lets come."""
    text = msgspec.msgpack.encode([state.forced, state.mask, state.complete, state.tried])
    return [state.seconds, -1 if state.tried is None else len(state.tried), state.error, crc32(text)]
