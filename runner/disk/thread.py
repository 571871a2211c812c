"""The disk thread. It reads up to eight times before each write, and sweeps when there is no room, or no other work.

The thread does one small piece of work at a time (`step`), so a request never waits for more than one segment of
another request. Messages are functions. The disk thread runs the engine thread's messages between two pieces of work,
and `post` makes the engine thread run the disk thread's. So only the disk thread changes the state in this module.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from runner.disk.files import Files
from runner.disk.segment import Name, Segment
from runner.disk.segment_reader import FoundSegment, Reader, Wanted
from runner.disk.store import SegmentStore
from runner.disk.sweep import Sweep
from runner.logs import Log

log = Log(__name__)
_SWEEP_S = 60.0
_MOST_SWEEPS = 3  # sweeps to make room for one segment: another process may use the room first
_BREATH_S = 0.001
"""The pause between two parts of a sweep, in which other threads run Python."""
_READS = 8  # the most reads in a row while a segment waits to be written
_AHEAD = 2  # the segments of one prompt that may be read before the first of them is in the trie


class Reading:
    """A prompt whose segments are being read. Owner: the disk thread."""

    def __init__(self, wanted: Wanted, take: Callable[[FoundSegment | None], None]) -> None:
        """The engine thread calls `take` with each segment, and with None after the last."""
        self.wanted = wanted
        self.take = take
        self.credit = _AHEAD
        """The number of segments that may be read before the engine has inserted another one."""
        self.dropped = False
        """True if no request waits for this reading any more."""
        self.found: Iterator[FoundSegment] | None = None

    @property
    def ready(self) -> bool:
        """True if the next segment may be read, or if the end can be reported."""
        return self.credit > 0 or self.dropped


class DiskThread:
    """Does all work that may wait for the disk. Any thread may call the public methods, except `step`."""

    def __init__(
        self,
        files: Files,
        store: SegmentStore,
        sweep: Sweep,
        reader: Reader,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.store = store
        self.sweep = sweep
        self.fault = ""
        """The error that ended the thread. Empty while the thread runs."""
        self._files = files
        self._reader = reader
        self._post = post
        self._inbox = SimpleQueue[Callable[[], None]]()
        self._inbox.put(store.open)
        self._readings: deque[Reading] = deque()
        self._reads = 0  # the number of reads in a row while a segment waits to be written
        self._writes: deque[tuple[Segment, Callable[[bool], None]]] = deque()
        self._sweeping: Iterator[None] | None = None
        self._swept_s = float("-inf")
        self._swept_bytes = -1  # the store's `written_bytes` when the last sweep began
        self._sweeps_for_room = 0  # the number of sweeps for the segment that is to be written next

    def start(self) -> None:
        threading.Thread(target=self._run, name="disk", daemon=True).start()

    def look_for(self, reading: Reading) -> None:
        self._inbox.put(partial(self._readings.append, reading))

    def taken(self, reading: Reading, buffer: memoryview | None = None) -> None:
        """Records that the engine has inserted a segment of this reading. A later read may use `buffer`."""
        self._inbox.put(partial(self._credit, reading, buffer))

    def drop(self, reading: Reading) -> None:
        """Ends a reading for which no request waits any more."""
        self._inbox.put(partial(setattr, reading, "dropped", True))

    def write(self, segment: Segment, done: Callable[[bool], None]) -> None:
        """Queues a segment for writing. The engine thread then calls `done` with True if the segment is on disk. The
        segment's bytes must not change before that."""
        self._inbox.put(partial(self._writes.append, (segment, done)))

    def touch(self, name: Name) -> None:
        self._inbox.put(partial(self.store.touch, name))

    def reject(self, name: Name, reason: str) -> None:
        """Queues the removal of a segment that the layers cannot hold."""
        self._inbox.put(partial(self.store.reject, name, reason))

    def step(self) -> bool:
        """Does one piece of work. Returns False if there is none. Any error that this raises is a fault of the code."""
        while not self._inbox.empty():
            self._inbox.get()()
        making_room = self._sweeping is not None and self._sweeps_for_room > 0
        reading = self._ready() if self._reads < _READS or not self._writes else None
        self._reads = 0 if reading is None or not self._writes else self._reads + 1
        if reading is not None:
            self._read(reading)
        elif self._writes and not making_room:
            self._write()
        elif self._sweeping is not None:
            if next(self._sweeping, self) is self:
                self._sweeping = None
        elif self._sweep_in_s() == 0:
            self._begin_sweep()
        else:
            return False
        return True

    def _ready(self) -> Reading | None:
        return next((each for each in self._readings if each.ready), None)

    def _credit(self, reading: Reading, buffer: memoryview | None) -> None:
        reading.credit += 1
        if buffer is not None and reading in self._readings:
            self.store.buffers.append(buffer)

    def _write(self) -> None:
        segment, done = self._writes[0]
        written = self.store.publish(segment, self.sweep.reserve) if self.store.may_write else False
        if written is None:
            if self._sweeps_for_room < _MOST_SWEEPS:
                self._sweeps_for_room += 1
                self._begin_sweep()
                return
            self.store.rest("there is no room")
        self._writes.popleft()
        self._sweeps_for_room = 0
        self._post(partial(done, bool(written)))

    def _begin_sweep(self) -> None:
        self._swept_s = self._files.now_s()
        self._swept_bytes = self.store.written_bytes
        self._sweeping = self.sweep.run(self._removed)

    def _removed(self, folder: Path, name: Name) -> None:
        if folder == self.store.folder:
            self.store.index.discard(name)

    def _read(self, reading: Reading) -> None:
        found = None
        if not reading.dropped:
            if reading.found is None:
                self.store.relist()
                reading.found = self._reader.read_prompt(reading.wanted)
            found = next(reading.found, None)
        reading.credit -= 1
        if found is None:
            self._readings.remove(reading)
            if not self._readings:
                self.store.buffers.clear()
        self._post(partial(reading.take, found))

    def _sweep_in_s(self) -> float | None:
        """Returns the seconds until the next sweep is due, or None if nothing was written since the last sweep."""
        if self._swept_bytes == self.store.written_bytes:
            return None
        passed = self._files.now_s() - self._swept_s
        return max(0.0, _SWEEP_S - passed) if passed >= 0 else 0.0

    def _run(self) -> None:
        try:
            while True:
                worked = self.step()
                if worked and (self._sweeping is None or self._writes or self._ready() is not None):
                    continue
                with suppress(Empty):
                    self._inbox.get(timeout=_BREATH_S if worked else self._sweep_in_s())()
        except Exception as error:  # requests must continue without the disk
            log.exception("the disk cache is off")
            self.fault = f"{type(error).__name__}: {error}"
            for reading in self._readings:
                self._post(partial(reading.take, None))
