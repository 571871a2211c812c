"""Writes a tape."""

from collections.abc import Callable
from typing import Protocol

from runner.engine.tape.interface import Read, Value, What
from runner.engine.tape.values import Entry


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
