"""Reports the progress of long work, at most once a second."""

import threading
import time
from collections.abc import Callable

from runner.logs import Log

_EVERY_S = 1.0


class Progress:
    """Counts the bytes that are done, and logs them once a second; a subclass may report otherwise. Thread-safe."""

    def __init__(
        self, log: Log, what: str, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`what` is the log message, such as `loading`. Of `total` bytes, `done` were done before the start."""
        self.total = total
        self.done = done
        self._log = log
        self._what = what
        self._clock = clock
        self._started_s = self._reported_s = clock()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return round(self._clock() - self._started_s, 1)

    @property
    def reported(self) -> bool:
        """True if progress was reported at least once."""
        return self._reported_s > self._started_s

    def add(self, count: int) -> None:
        """Adds `count` bytes. Reports progress if the last report is at least a second old."""
        with self._lock:
            self.done += count
            now_s = self._clock()
            if now_s - self._reported_s < _EVERY_S:
                return
            self._reported_s = now_s
            done = self.done
        self._report(done, 100 * done // max(1, self.total), now_s - self._started_s)

    def _report(self, done: int, percent: int, seconds: float) -> None:
        self._log.info(self._what, percent=percent, bytes=done, total=self.total, seconds=round(seconds, 1))
