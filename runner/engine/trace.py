"""Where the engine's time goes: slices and their parts, as a file that Perfetto and chrome://tracing open."""

import json
import os
from pathlib import Path
from time import perf_counter_ns
from typing import TextIO

from runner.errors import UsageError

_FLUSH_EVENTS = 4096


class Trace:
    """A stopwatch that the parts of a slice press when they are over. Does nothing until it is started.

    Owner: the engine thread. There is one for the process, as there is one engine.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._events: list[dict[str, object]] = []
        self._mark = self._begun = self._before = 0
        self._slice = ""
        self._facts: dict[str, int] = {}

    def start(self, path: Path) -> None:
        """Write into this file, which is overwritten. UsageError if it cannot be."""
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            raise UsageError(f"--trace {path}: {reason}; name a file that you may write") from error
        self._file.write("[\n")  # a missing end is allowed: the process ends when it is told to

    def begin(self) -> None:
        """A slice begins."""
        if self._file is not None:
            self._mark = self._begun = perf_counter_ns()
            self._before = len(self._events)
            self._slice = ""

    def name(self, slice_name: str, **facts: int) -> None:
        """What the slice is; one without a name is not written."""
        if self._file is not None:
            self._slice, self._facts = slice_name, facts

    def lap(self, part: str) -> None:
        """The part that began with the slice or after the last one is over."""
        if self._file is not None:
            now = perf_counter_ns()
            self._add(part, self._mark, now, {})
            self._mark = now

    def end(self) -> None:
        """The slice is over."""
        if self._file is None:
            return
        if self._slice:
            self._add(self._slice, self._begun, perf_counter_ns(), self._facts)
        else:
            del self._events[self._before :]
        if len(self._events) >= _FLUSH_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Write what there is; called when the engine has nothing to do, and now and then."""
        if self._file is not None:
            self._file.writelines(json.dumps(event) + ",\n" for event in self._events)
            self._file.flush()
            self._events.clear()

    def _add(self, name: str, begun_ns: int, ended_ns: int, facts: dict[str, int]) -> None:
        event = {"name": name, "ph": "X", "pid": 1, "tid": 1, "ts": begun_ns / 1e3, "dur": (ended_ns - begun_ns) / 1e3}
        self._events.append(event | {"args": facts} if facts else event)


TRACE = Trace()
