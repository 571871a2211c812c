"""A tape: a sequence of entries, which a `Recorder` writes and a `Player` reads. Owner: the engine thread."""

from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from typing import Protocol, TypeVar, cast

import msgspec

Value = None | bool | int | float | str | bytes | list["Value"]
"""A value that a tape can hold."""
Read = TypeVar("Read", bound=Value)


class EntryKind(IntEnum):
    """The kinds of entry. Each number keeps its meaning within one version of the format."""

    TURN = 0
    """The outside events before a slice: a `Turn`, or None for no events."""
    SECONDS = 2
    """The time of a slice or a step, or a clock's reading."""
    ACTIVE = 3
    """The bytes that MLX has in use."""
    PEAK = 4
    """The most bytes that MLX had in use."""
    GRAMMAR_BYTES = 5
    """The bytes that other processes take, such as those that compile grammars."""
    MACHINE = 6
    """The bytes of the machine's memory, of the budget, or of what MLX may keep for reuse."""
    FAULT = 7
    """The exception that a computation raised, as type and text, or None."""
    GRAMMAR = 8
    """The state at the beginning of a grammar, the text of an error, or None."""
    STATE = 9
    """The next state of a grammar, or None if the state is late."""
    TOKENS = 10
    """The number of a request, and the next tokens of its answer."""
    EVENT = 11
    """The number of a request, and an event for its client."""
    ENDED = 12
    """The number of a request, with the outcome and the counts at its end."""
    FORWARD = 13
    """For ranks: the shape of a forward's tokens, and the position at which the forward begins."""

    @property
    def label(self) -> str:
        """The name of the kind, in words."""
        return self.name.lower().replace("_", " ")


Entry = tuple[EntryKind, Value]
_entries_decoder = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
_value_decoder = msgspec.msgpack.Decoder()


def decode_entries(data: bytes) -> list[Entry]:
    """Returns the entries that msgspec has encoded as MessagePack. Raises ValueError if `data` is anything else."""
    return [(EntryKind(kind), _value_decoder.decode(value)) for kind, value in _entries_decoder.decode(data)]


class Tape(Protocol):
    """The values that an engine reads and computes. A tape notes them, or compares them with values noted before."""

    def input(self, kind: EntryKind, read: Callable[[], Read]) -> Read:
        """Returns an outside value: the result of `read` or, in a replay, the recorded value. `read` must not raise."""

    def check(self, kind: EntryKind, value: Value) -> None:
        """Notes a value that the engine computed; in a replay, compares it with the recorded value."""

    def flush(self) -> None:
        """Writes all entries noted so far. Called before every forward, since a forward may never return."""


class Recorder:
    """The tape that notes the values of an engine."""

    def __init__(self, write: Callable[[list[Entry]], None], without: Collection[EntryKind] = ()) -> None:
        """Notes no entries of the kinds in `without`."""
        self._write = write
        self._without = without
        self._entries: list[Entry] = []
        self.on = True
        """True during a slice. Values that are read between two slices, for statistics, are not noted."""

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
    """The replay differs from the recording. This is a BaseException, because it ends the replay, not one request."""


class TapeEnd(BaseException):
    """The tape has no more entries."""


class Player:
    """The tape that plays back recorded values. Methods raise DiffersError if the next entry is another one than
    expected, and TapeEnd if there is no next entry."""

    def __init__(
        self,
        entries: Iterator[Entry],
        without: Collection[EntryKind] = (),
        sides: tuple[str, str] = ("recorded", "replayed"),
    ) -> None:
        """`entries` contain none of the kinds in `without`. `sides` name the two values in the text of a difference."""
        self._entries = entries
        self._without = without
        self._sides = sides
        self.slices = 0
        """The number of slices so far, including the present slice."""

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
        """Does nothing: a player writes nothing."""

    def next_turn(self) -> Value:
        """Returns the turn before the next slice."""
        found, value = self._next()
        if found is not EntryKind.TURN:
            raise self.differs(found, value, "the slice is over")
        self.slices += 1
        return value

    def differs(self, kind: EntryKind, recorded: Value, replayed: str) -> DiffersError:
        """Returns the error that shows the recorded entry and the replayed one."""
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
