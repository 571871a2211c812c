"""A tape: entries of several kinds, which a `Recorder` writes and a `Player` reads. Owner: the engine thread."""

from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from typing import Protocol, TypeVar, cast

import msgspec

Value = None | bool | int | float | str | bytes | list["Value"]
"""A value that can stand on a tape."""
Read = TypeVar("Read", bound=Value)


class EntryKind(IntEnum):
    """The kinds of entry. A number keeps its meaning as long as the version of the format stays."""

    TURN = 0
    """What happened outside before a slice: a `Turn`, or nothing."""
    SECONDS = 2
    """The time that a slice or a step took, or a clock."""
    ACTIVE = 3
    """The bytes that MLX has in use."""
    PEAK = 4
    """The most bytes that it had."""
    GRAMMAR_BYTES = 5
    """The bytes that grammars take."""
    MACHINE = 6
    """The bytes of the memory, of the budget, or of what may be kept for reuse."""
    FAULT = 7
    """The exception that a computation raised, type and text, or nothing."""
    GRAMMAR = 8
    """Why a grammar could not be followed, or nothing."""
    STATE = 9
    """The next state of a grammar, or nothing if it is late."""
    TOKENS = 10
    """The number of a request, and its next tokens."""
    EVENT = 11
    """The number of a request, and an event for its client."""
    ENDED = 12
    """The number of a request, its outcome, and its counts."""
    FORWARD = 13
    """Between ranks: the shape of the tokens of a forward, and the position that it begins at."""

    @property
    def label(self) -> str:
        """The kind in words."""
        return self.name.lower().replace("_", " ")


Entry = tuple[EntryKind, Value]
_entries_decoder = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
_value_decoder = msgspec.msgpack.Decoder()


def decode_entries(data: bytes) -> list[Entry]:
    """Returns entries that msgspec has encoded as MessagePack. Raises ValueError for anything else."""
    return [(EntryKind(kind), _value_decoder.decode(value)) for kind, value in _entries_decoder.decode(data)]


class Tape(Protocol):
    """The values that an engine reads and computes: noted as they come, or compared with the values noted before."""

    def input(self, kind: EntryKind, read: Callable[[], Read]) -> Read:
        """Returns a value from outside: the result of `read`, which must not raise, or in a replay the recorded
        value."""

    def check(self, kind: EntryKind, value: Value) -> None:
        """Notes a value that follows from earlier ones; in a replay, compares it with the recorded value."""

    def flush(self) -> None:
        """Writes everything so far, at once. Called before every forward, which may never return."""


class Recorder:
    """The tape of an engine that is recorded."""

    def __init__(self, write: Callable[[list[Entry]], None], without: Collection[EntryKind] = ()) -> None:
        """Leaves out entries of the kinds in `without`."""
        self._write = write
        self._without = without
        self._entries: list[Entry] = []
        self.on = True
        """False between two slices: values that statistics read decide nothing."""

    def input(self, kind: EntryKind, read: Callable[[], Read]) -> Read:
        value = read()
        if self.on:
            self.check(kind, value)
        return value

    def check(self, kind: EntryKind, value: Value) -> None:
        if kind not in self._without:
            self._entries.append((kind, value))

    def flush(self) -> None:
        if self._entries:
            entries, self._entries = self._entries, []
            self._write(entries)


_MOST_SHOWN = 300


class DiffersError(BaseException):
    """The replay differs from the recording. A BaseException, because it ends everything, not one request."""


class TapeEnd(BaseException):
    """The tape has no more entries."""


class Player:
    """The tape of an engine that is replayed. Its methods raise DiffersError if the next entry is another one than is
    asked for, and TapeEnd if there is none."""

    def __init__(
        self,
        entries: Iterator[Entry],
        without: Collection[EntryKind] = (),
        sides: tuple[str, str] = ("recorded", "replayed"),
    ) -> None:
        """The entries have none of the kinds in `without`. `sides` name the two values in a difference."""
        self._entries = entries
        self._without = without
        self._sides = sides
        self.slices = 0
        """The number of slices so far, the present one included."""

    def input(self, kind: EntryKind, read: Callable[[], Read]) -> Read:
        if kind in self._without:
            return read()
        found, value = self._next()
        if found is not kind:
            raise self.differs(found, value, f"asks for: {kind.label}")
        return cast("Read", value)

    def check(self, kind: EntryKind, value: Value) -> None:
        if kind not in self._without and (found := self._next()) != (kind, value):
            raise self.differs(*found, f"{kind.label} {_shown(value)}")

    def flush(self) -> None:
        """Does nothing."""

    def next_turn(self) -> Value:
        """Returns the turn that begins the next slice."""
        found, value = self._next()
        if found is not EntryKind.TURN:
            raise self.differs(found, value, "the slice is over")
        self.slices += 1
        return value

    def differs(self, kind: EntryKind, recorded: Value, replayed: str) -> DiffersError:
        """Returns the error that says both."""
        there, here = self._sides
        return DiffersError(f"slice {self.slices}: {there}: {kind.label} {_shown(recorded)}; {here}: {replayed}")

    def _next(self) -> Entry:
        entry = next(self._entries, None)
        if entry is None:
            raise TapeEnd
        return entry


def _shown(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
