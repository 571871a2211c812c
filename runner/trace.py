"""The trace of the engine: the times of slices and of their parts, in a file for Perfetto and chrome://tracing."""

import json
import os
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path
from time import perf_counter_ns

from runner.errors import UsageError
from runner.logs import Log

_FLUSH_EVENTS = 4096

log = Log(__name__)


class Trace:
    """A stopwatch for slices. Each part of a slice calls `lap` at its end. Before `start`, all methods do nothing.

    A file must not block or end the engine thread, so only a regular file is accepted, and tracing stops if a write
    fails. A process has one trace, as it has one engine. Owner: the engine thread.
    """

    def __init__(self) -> None:
        self.on = False
        """True while slices are traced. Code that runs for every token checks this before `name` and `lap`."""
        self._file: FileIO | None = None
        self._path = Path()
        self._file_bytes = 0
        self._events: list[dict[str, object]] = []
        # Set by the present slice.
        self._begun = 0
        self._mark = 0  # the end of the slice's last part, where the next part begins
        self._before = 0  # the number of events before the slice
        self._slice = ""
        self._facts: dict[str, int] = {}

    def start(self, path: Path) -> None:
        """Starts to trace into the file at `path`, overwriting it. Raises UsageError if it cannot be written."""
        try:
            self._file = _open(path)
            self._path = path
        except OSError as error:
            raise UsageError(f"--trace {path}: {_reason(error)}; name a file that you may write") from error
        self.on = True
        self._write("[\n")  # viewers need no closing bracket: the process may end at any time

    def begin(self) -> None:
        """Starts a slice."""
        if self._file is not None:
            self._mark = self._begun = perf_counter_ns()
            self._before = len(self._events)
            self._slice = ""

    def name(self, slice_name: str, **facts: int) -> None:
        """Names the present slice. A slice without a name is not written to the file."""
        if self._file is not None:
            self._slice = slice_name
            self._facts = facts

    def lap(self, part: str) -> None:
        """Ends a part of the slice, which began at the end of the part before."""
        if self._file is not None:
            now = perf_counter_ns()
            self._add(part, self._mark, now, {})
            self._mark = now

    def end(self) -> None:
        """Ends the slice."""
        if self._file is None:
            return
        if self._slice:
            self._add(self._slice, self._begun, perf_counter_ns(), self._facts)
        else:
            del self._events[self._before :]
        if len(self._events) >= _FLUSH_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Writes the events so far. Called when the engine is idle, and after many events."""
        if self._file is not None and self._events:
            self._write("".join(f"{json.dumps(event)},\n" for event in self._events))
            self._events.clear()

    def _write(self, text: str) -> None:
        """Writes the lines of `text`. If that fails, tracing stops, and the file keeps its complete lines."""
        assert self._file is not None
        data, written = text.encode(), 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
            self._file_bytes += written
        except OSError as error:
            log.warning("tracing stopped", file=str(self._path), why=_reason(error))
            file, self._file, self.on = self._file, None, False
            with suppress(OSError):
                file.truncate(self._file_bytes + data.rfind(b"\n", 0, written) + 1)  # viewers refuse half an event
            with suppress(OSError):
                file.close()

    def _add(self, name: str, begun_ns: int, ended_ns: int, facts: dict[str, int]) -> None:
        event = {"name": name, "ph": "X", "pid": 1, "tid": 1, "ts": begun_ns / 1e3, "dur": (ended_ns - begun_ns) / 1e3}
        self._events.append(event | {"args": facts} if facts else event)


def _open(path: Path) -> FileIO:
    """Returns an empty file for writing. Raises OSError if that fails, or for a pipe or device, which could block."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
    file = FileIO(number, "w")
    if not stat.S_ISREG(os.fstat(number).st_mode):
        file.close()
        raise OSError("not a regular file")
    file.truncate()
    return file


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


TRACE = Trace()
