"""Writes a tape."""

from collections.abc import Callable, Iterator
from typing import Protocol, cast

from runner.engine.ports import Read, Value, What
from runner.tape.file import Entry


class Sink(Protocol):
    """The destination of a tape."""

    def write(self, entries: list[Entry]) -> None:
        """Takes entries, in one write."""


class Recorder:
    """The tape of an engine that is recorded. Owner: the engine thread."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._entries: list[Entry] = []
        self.on = True
        """False between two slices: what is read for statistics decides nothing."""

    def of(self, what: What, make: Callable[[], Read]) -> Read:
        """Returns what `make` returns, and keeps it for the next write."""
        value = make()
        if self.on:
            self._entries.append((what, value))
        return value

    def same(self, what: What, value: Value) -> None:
        """Keeps the value for the next write."""
        self._entries.append((what, value))

    def fault(self, met: list[Value] | None) -> list[Value] | None:
        """Returns the fault, and keeps it for the next write."""
        return self.of(What.FAULT, lambda: met)

    def flush(self) -> None:
        """Writes what was kept, in one write."""
        if self._entries:
            entries, self._entries = self._entries, []
            self._sink.write(entries)


# --- Reads a tape in place of the world outside.

_MOST_SHOWN = 300


class DiffersError(BaseException):
    """The replay does something else than was recorded. No exception of a request: nothing may go on behind it."""


class TapeEnd(BaseException):
    """The tape has no more values."""


class Player:
    """The tape of an engine that is replayed. Owner: the engine thread."""

    sides = ("recorded", "replayed")
    """The names of the two values in a difference."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries
        self.slices = 0
        """The number of slices so far, the present one included."""

    def of(self, what: What, make: Callable[[], Read]) -> Read:  # noqa: ARG002 - it was called when it was recorded
        """Returns the recorded value. Raises DiffersError if another kind comes next, and TapeEnd if nothing does."""
        found, value = self._next()
        if found is not what:
            raise self.differs(found, value, f"asks for: {what.label}")
        return cast("Read", value)

    def same(self, what: What, value: Value) -> None:
        """Raises DiffersError unless this is the recorded value, and TapeEnd if nothing was recorded."""
        found, recorded = self._next()
        if (found, recorded) != (what, value):
            raise self.differs(found, recorded, f"{what.label} {_shown(value)}")

    def fault(self, met: list[Value] | None) -> list[Value] | None:
        """Returns the recorded fault. Raises DiffersError if another one was met, and as `of`."""
        told = self.of(What.FAULT, lambda: met)
        if met is not None and told != met:
            raise self.differs(What.FAULT, told, f"fault {met}")
        return told

    def flush(self) -> None:
        """Does nothing."""

    def next_turn(self) -> Value:
        """Returns the turn that begins the next slice. Raises as `of`."""
        found, value = self._next()
        if found is not What.TURN:
            raise self.differs(found, value, "the slice is over")
        self.slices += 1
        return value

    def differs(self, what: What, recorded: Value, replayed: str) -> DiffersError:
        """Returns the error that says both."""
        there, here = self.sides
        return DiffersError(f"slice {self.slices}: {there}: {what.label} {_shown(recorded)}; {here}: {replayed}")

    def _next(self) -> Entry:
        entry = next(self._entries, None)
        if entry is None:
            raise TapeEnd
        return entry


def _shown(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
