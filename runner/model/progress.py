"""Logs the progress of long work on many bytes."""

import threading
import time

from runner.logs import Log

_LOG_EVERY_S = 1.0


class Progress:
    """A counter of bytes done, logged once a second. Thread-safe."""

    def __init__(self, log: Log, what: str, total_bytes: int) -> None:
        """`what` is the log message, for example `loading`."""
        self.total_bytes = total_bytes
        self._log = log
        self._what = what
        self._done_bytes = 0
        self._started = self._logged = time.monotonic()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self._started, 1)

    def add(self, count: int) -> None:
        """Adds `count` bytes; logs if the last line is a second old."""
        with self._lock:
            self._done_bytes += count
            now = time.monotonic()
            if now - self._logged < _LOG_EVERY_S:
                return
            self._logged = now
            done, seconds = self._done_bytes, round(now - self._started, 1)
        percent = 100 * done // max(1, self.total_bytes)
        self._log.info(self._what, percent=percent, bytes=done, total=self.total_bytes, seconds=seconds)
