"""The disk thread: a few reads before each write, and sweeps when there is no room, or nothing else to do.

It does one small piece of work after the other (`step`), so a request never waits for more than one segment of another
request. Messages are functions: the disk thread runs the engine's between two pieces of work, and `post` runs its own
on the engine thread. So all state but the counts belongs to one thread.
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
_MOST_SWEEPS = 3  # for one segment: other processes may take the room
_BREATH_S = 0.001
"""The pause between two parts of a sweep, in which other threads run Python."""
_READS = 8  # in a row, while a segment waits to be written
_AHEAD = 2  # segments of one prompt that may be read before the trie has them


class Reading:
    """A prompt to look for. Owner: the disk thread."""

    def __init__(self, wanted: Wanted, take: Callable[[FoundSegment | None], None]) -> None:
        """`take` is called on the engine thread with each segment, then with None."""
        self.wanted = wanted
        self.take = take
        self.credit = _AHEAD
        """The number of segments that may be read before the engine takes another one."""
        self.dropped = False
        """True if nobody waits for it any more."""
        self.found: Iterator[FoundSegment] | None = None

    @property
    def ready(self) -> bool:
        """True if its next segment may be read, or its end reported."""
        return self.credit > 0 or self.dropped


class DiskThread:
    """Does everything that may wait for the disk. Any thread may call the public methods but `step`."""

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
        """The error that ended the thread; empty while it runs."""
        self._files = files
        self._reader = reader
        self._post = post
        self._inbox = SimpleQueue[Callable[[], None]]()
        self._inbox.put(store.open)
        self._readings: deque[Reading] = deque()
        self._reads = 0  # since a segment waits, or another piece of work was done
        self._writes: deque[tuple[Segment, Callable[[bool], None]]] = deque()
        self._sweeping: Iterator[None] | None = None
        self._swept_s = float("-inf")
        self._swept_bytes = -1  # of the store when the last sweep began
        self._sweeps_for_room = 0  # since the last segment that found some

    def start(self) -> None:
        threading.Thread(target=self._run, name="disk", daemon=True).start()

    def look_for(self, reading: Reading) -> None:
        self._inbox.put(partial(self._readings.append, reading))

    def taken(self, reading: Reading, buffer: memoryview | None = None) -> None:
        """Records that the engine has taken a segment of a prompt. A later one is read into `buffer`, if it fits."""
        self._inbox.put(partial(self._credit, reading, buffer))

    def drop(self, reading: Reading) -> None:
        """Ends a reading that nobody waits for any more."""
        self._inbox.put(partial(setattr, reading, "dropped", True))

    def write(self, segment: Segment, done: Callable[[bool], None]) -> None:
        """Writes a segment. Its bytes must not change until `done` is called on the engine thread."""
        self._inbox.put(partial(self._writes.append, (segment, done)))

    def touch(self, name: Name) -> None:
        self._inbox.put(partial(self.store.touch, name))

    def reject(self, name: Name, reason: str) -> None:
        """Removes a segment that the layers cannot hold."""
        self._inbox.put(partial(self.store.reject, name, reason))

    def step(self) -> bool:
        """Does one piece of work; returns False if there is none. Raises only the errors of its own code."""
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
        """Returns the seconds until the next sweep; None if nothing was written since the last one."""
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
        except Exception as error:  # answers go on without the disk
            log.exception("the disk cache is off")
            self.fault = f"{type(error).__name__}: {error}"
            for reading in self._readings:
                self._post(partial(reading.take, None))
