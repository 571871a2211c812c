"""Puts grammars on a tape: the states that grammar workers send are outside values."""

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from runner.errors import RequestError
from runner.tape.tape import EntryKind, Tape, Value

if TYPE_CHECKING:
    from runner.engine.answer_grammar import Grammar, Guidance, StateTape

_MOST_KNOWN_BYTES = 8 << 20


class KnownStates:
    """The latest states on a tape, by their places. Answers return to the same few states, and each state is large: its
    mask has a bit for each token of the vocabulary. The writer and the reader of a tape know the same states."""

    def __init__(self) -> None:
        self._bodies: dict[int, bytes] = {}
        self._places: dict[bytes, int] = {}
        self._count = 0
        self._nbytes = 0

    def place(self, body: bytes) -> int | bytes:
        """Returns the value to write for a state: its place if it is known, else the state itself."""
        return self._places.get(body, body)

    def body(self, found: int | bytes) -> bytes:
        """Returns the state for which the value `found` stands. Raises ValueError if there is none."""
        if isinstance(found, int):
            if found not in self._bodies:
                raise ValueError(f"no state {found}")
            return self._bodies[found]
        self._bodies[self._count] = found
        self._places[found] = self._count
        self._count += 1
        self._nbytes += len(found)
        while self._nbytes > _MOST_KNOWN_BYTES:
            oldest = self._bodies.pop(next(iter(self._bodies)))
            self._places.pop(oldest, None)
            self._nbytes -= len(oldest)
        return found


class TapedStates:
    """The states that grammars send, noted on a tape or played back from it. Owner: the engine thread."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._known = KnownStates()

    def beginning(self, own: Callable[[], bytes | None]) -> bytes | None:
        def begin() -> Value:
            body = own()
            return None if body is None else self._known.place(body)

        found = msgspec.convert(_input(self._tape, EntryKind.GRAMMAR, begin), int | bytes | None)
        return None if found is None else self._known.body(found)

    def send(self, own: Callable[[], None]) -> None:
        _input(self._tape, EntryKind.GRAMMAR, own)

    def receive(self, own: Callable[[], tuple[float, bytes] | None]) -> tuple[float, bytes] | None:
        def receive() -> Value:
            state = own()
            return None if state is None else [state[0], self._known.place(state[1])]

        recorded = _input(self._tape, EntryKind.STATE, receive)
        if recorded is None:
            return None
        seconds, found = msgspec.convert(recorded, tuple[float, int | bytes])
        return seconds, self._known.body(found)

    def clock(self) -> float:
        return self._tape.input(EntryKind.SECONDS, monotonic)


class TapedGrammar(NamedTuple):
    """A compiled grammar whose states go through a tape. Owner: the engine thread."""

    grammar: "Grammar"
    states: TapedStates

    def guide(self, tape: "StateTape | None" = None) -> "Guidance | None":
        return self.grammar.guide(tape or self.states)

    def release(self) -> None:
        """Frees a grammar that no answer will follow."""
        self.grammar.release()


def _input(tape: Tape, kind: EntryKind, read: Callable[[], Value]) -> Value:
    """Returns the value of `read`. If that raises RequestError, the tape notes the text, and this raises it again."""

    def attempt() -> Value:
        try:
            return read()
        except RequestError as error:
            return str(error)

    found = tape.input(kind, attempt)
    if isinstance(found, str):
        raise RequestError(found)
    return found
