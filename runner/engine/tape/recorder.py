"""Writes a tape."""

from collections.abc import Callable

from runner.engine.tape.file import TapeFile
from runner.engine.tape.interface import Read, Value, What
from runner.engine.tape.values import Entry


class Recorder:
    """The tape of an engine that is recorded. Owner: the engine thread."""

    def __init__(self, file: TapeFile) -> None:
        self._file = file
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

    def flush(self) -> None:
        """Writes what was kept, in one write."""
        if self._entries:
            entries, self._entries = self._entries, []
            self._file.write(entries)
