"""The disk thread: reads before writes, and sweeps when there is nothing else to do, or no room.

It does one small piece of work after the other (`step`), so that a request never waits for more than one segment of
another. What it has done it tells through `post`, which runs a function on the engine thread.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from runner.disk.reader import Found, Reader, Wanted
from runner.disk.segment import Name, Segment
from runner.logs import Log

if TYPE_CHECKING:
    from pathlib import Path

    from runner.disk.files import Files
    from runner.disk.shelf import Shelf
    from runner.disk.sweep import Sweep

log = Log(__name__)
_SWEEP_S = 60.0
_MOST_SWEEPS = 3  # for one segment: other processes may take the room
_BREATH_S = 0.001
"""Between two parts of a sweep: other threads run Python, too."""
_AHEAD = 2  # segments of one prompt that are read and not yet adopted


class Reading:
    """A prompt that is looked for. Made by the engine, which gives it a credit for each segment adopted."""

    def __init__(self, wanted: Wanted, take: Callable[[Found | None], None]) -> None:
        """`take` is called on the engine thread with each segment, then with None."""
        self.wanted = wanted
        self.take = take
        self.credit = _AHEAD
        self.dropped = False
        """True if nobody waits for it any more."""
        self.found: Iterator[Found] | None = None


class DiskThread:
    """Everything that may wait for the disk. The methods may be called on any thread; what begins with an underscore
    runs on the disk thread alone."""

    def __init__(
        self,
        files: "Files",
        shelf: "Shelf",
        sweep: "Sweep",
        reader: Reader,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.shelf, self.sweep = shelf, sweep
        self.fault = ""
        """The error that ended the thread; empty while it is in order."""
        self._files, self._reader, self._post = files, reader, post
        self._changed = threading.Condition()
        self._readings: deque[Reading] = deque()
        self._writes: deque[tuple[Segment, Callable[[bool], None]]] = deque()
        self._touches: deque[Name] = deque()
        self._rejects: deque[tuple[Name, str]] = deque()
        self._emptying = False
        self._sweeping: Iterator[None] | None = None
        self._opened = False
        self._swept_s = float("-inf")
        self._swept_bytes = -1  # of the shelf when the last sweep began
        self._sweeps_for_room = 0  # since the last segment that found some

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="disk", daemon=True).start()

    def read(self, reading: Reading) -> None:
        """Looks for a prompt."""
        with self._changed:
            self._readings.append(reading)
            self._changed.notify()

    def adopted(self, reading: Reading, buffer: memoryview | None = None) -> None:
        """Notes that the engine has taken a segment of a prompt, or waits for it no more. A later segment is read into
        `buffer`, if it is large enough."""
        with self._changed:
            reading.credit += 1
            if buffer is not None and reading in self._readings:
                self.shelf.buffers.append(buffer)
            self._changed.notify()

    def write(self, segment: Segment, done: Callable[[bool], None]) -> None:
        """Writes a segment, whose bytes stay as they are until `done` is called on the engine thread."""
        with self._changed:
            self._writes.append((segment, done))
            self._changed.notify()

    def touch(self, name: Name) -> None:
        """Marks a segment as just used."""
        with self._changed:
            self._touches.append(name)
            self._changed.notify()

    def reject(self, name: Name, reason: str) -> None:
        """Removes a segment that cannot be adopted."""
        with self._changed:
            self._rejects.append((name, reason))
            self._changed.notify()

    def empty(self) -> None:
        """Removes all segments of the model, and those that wait to be written."""
        with self._changed:
            self._emptying = True
            dropped = list(self._writes)
            self._writes.clear()
            self._changed.notify()
        for _, done in dropped:
            done(False)

    def step(self) -> bool:
        """Does one piece of work; returns False if there is none. Raises whatever is wrong with the code."""
        if not self._opened:
            self._opened = True
            self.shelf.open()
            return True
        if self._emptying:
            self._emptying = False
            self.shelf.empty()
            self._swept_s, self._swept_bytes = float("-inf"), -1
            return True
        while self._rejects:
            self.shelf.reject(*self._rejects.popleft())
        with self._changed:
            reading = next((each for each in self._readings if each.credit > 0 or each.dropped), None)
            full = self._sweeping is not None and self._sweeps_for_room > 0
            writing = self._writes.popleft() if reading is None and self._writes and not full else None
            touches = []
            if reading is None and writing is None:
                touches = list(self._touches)
                self._touches.clear()
        if reading is not None:
            self._read(reading)
        elif writing is not None:
            self._write(*writing)
        elif touches:
            for name in dict.fromkeys(touches):
                self.shelf.touch(name)
        elif self._sweeping is not None:
            if next(self._sweeping, self) is self:
                self._sweeping = None
        elif self._sweep_in_s() == 0:
            self._begin_sweep()
        else:
            return False
        return True

    def _write(self, segment: Segment, done: Callable[[bool], None]) -> None:
        written = self.shelf.publish(segment, self.sweep.reserve) if self.shelf.may_write else False
        if written is None:
            if self._sweeps_for_room < _MOST_SWEEPS:
                self._sweeps_for_room += 1
                with self._changed:
                    self._writes.appendleft((segment, done))
                self._begin_sweep()
                return
            self.shelf.rest("there is no room")
        self._sweeps_for_room = 0
        self._post(lambda: done(bool(written)))

    def _begin_sweep(self) -> None:
        self._swept_s = self._files.now_s()
        self._swept_bytes = self.shelf.written_bytes
        self._sweeping = self.sweep.run(self._removed)

    def _read(self, reading: Reading) -> None:
        found = None
        if not reading.dropped:
            if reading.found is None:
                self.shelf.relist()
                reading.found = self._reader.read(reading.wanted)
            found = next(reading.found, None)
        with self._changed:
            reading.credit -= 1
            if found is None:
                self._readings.remove(reading)
                if not self._readings:
                    self.shelf.buffers.clear()
        self._post(lambda: reading.take(found))

    def _removed(self, path: "Path", name: Name) -> None:
        if path == self.shelf.folder:
            self.shelf.index.discard(name)

    def _sweep_in_s(self) -> float | None:
        """Returns the seconds until the next sweep; None if nothing was written since the last one."""
        if self._swept_bytes == self.shelf.written_bytes:
            return None
        passed = self._files.now_s() - self._swept_s
        return max(0.0, _SWEEP_S - passed) if passed >= 0 else 0.0

    def _run(self) -> None:
        try:
            while True:
                worked = self.step()
                if worked and self._sweeping is None:
                    continue
                with self._changed:
                    busy = any(each.credit > 0 or each.dropped for each in self._readings)
                    if not (busy or self._writes or self._touches or self._rejects or self._emptying):
                        self._changed.wait(_BREATH_S if worked else self._sweep_in_s())
        except Exception as error:  # answers go on without the disk
            log.exception("the disk cache is off")
            self._end(f"{type(error).__name__}: {error}")

    def _end(self, fault: str) -> None:
        self.fault = fault
        with self._changed:
            readings, writes = list(self._readings), list(self._writes)
        for reading in readings:
            self._post(lambda reading=reading: reading.take(None))  # type: ignore[misc]
        for _, done in writes:
            self._post(lambda done=done: done(False))  # type: ignore[misc]
