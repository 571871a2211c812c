"""How far long work on many bytes is, told in the log now and then."""

import threading
import time

from runner.logs import Log

_LOG_EVERY_S = 1.0


class Progress:
    """How many bytes are done. Any thread may count; whoever finds a second over writes the line."""

    def __init__(self, log: Log, what: str, total_bytes: int) -> None:
        """`what` is done, as the log shall say it: `loading`."""
        self.total_bytes = total_bytes
        self._log = log
        self._what = what
        self._done_bytes = 0
        self._started = self._logged = time.monotonic()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Since it was begun."""
        return round(time.monotonic() - self._started, 1)

    def add(self, count: int) -> None:
        """Counts so many bytes more."""
        with self._lock:
            self._done_bytes += count
            now = time.monotonic()
            if now - self._logged < _LOG_EVERY_S:
                return
            self._logged = now
            done, seconds = self._done_bytes, round(now - self._started, 1)
        percent = 100 * done // max(1, self.total_bytes)
        self._log.info(self._what, percent=percent, bytes=done, total=self.total_bytes, seconds=seconds)
