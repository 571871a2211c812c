"""What a runner process takes and how quickly it answers while others work: sampled from a thread of its own."""

import contextlib
import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.host import Process, UndecodableError
from tests.host.answers import decode_status

QUICK_S = 0.1
"""What hosts expect of a status at any time."""
_PERIOD_S = 0.05
_RSS_EVERY = 10
_WARM, _LATE = 0.4, 0.8  # shares of the time: what grows until the first is warm-up, the end begins at the second
_WINDOW = 0.2


class Trend(NamedTuple):
    """A quantity after the warm-up and at the end, in bytes, and its growth between, in bytes a minute."""

    warm: float
    late: float
    per_minute: float

    @classmethod
    def of(cls, samples: Sequence[tuple[float, float]]) -> "Trend":
        """Of (seconds, bytes) pairs. Medians over a fifth of the time each, so that no single sample counts."""
        start, end = samples[0][0], samples[-1][0]

        def window(share: float) -> list[float]:
            begins = start + (end - start) * share
            return [value for at, value in samples if begins <= at <= begins + (end - start) * _WINDOW]

        warm, late = median(window(_WARM)), median(window(_LATE))
        return cls(warm, late, (late - warm) / ((end - start) * (_LATE - _WARM) / 60))


class Meter(threading.Thread):
    """Asks for the status twenty times a second and notes the resident memory, until it is stopped.

    `latencies` are seconds; `own` are the same without the time in which the process was ready to run and other
    processes had the cores. `rss` and `memory` are pairs of `time.monotonic()` and bytes, `faults` what went wrong.
    """

    def __init__(self, process: Process) -> None:
        super().__init__(name="meter", daemon=True)
        self.latencies: list[float] = []
        self.own: list[float] = []
        self.rss: list[tuple[float, float]] = []
        self.memory: list[tuple[float, float]] = []
        self.faults: list[str] = []
        self._process = process
        self._stopped = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._process.port, timeout=10)
        while not self._stopped.wait(_PERIOD_S) and self._process.exit_status is None:
            try:
                self._sample(connection)
            except (OSError, http.client.HTTPException, UndecodableError) as error:
                self.faults.append(f"status: {type(error).__name__}: {error}")
                connection.close()
        connection.close()

    def _sample(self, connection: http.client.HTTPConnection) -> None:
        pid = self._process.pid
        waited, started = waiting_s(pid), time.monotonic()
        connection.request("GET", "/v1/status")
        status = decode_status(connection.getresponse().read())
        now = time.monotonic()
        self.latencies.append(now - started)
        self.own.append(max(now - started - (waiting_s(pid) - waited), 0.0))
        self.memory.append((now, status.memory))
        if len(self.latencies) % _RSS_EVERY == 1:
            self.rss.append((now, rss_bytes(pid)))

    def stop(self) -> None:
        """Ends it and waits for that."""
        self._stopped.set()
        self.join(20)


def rss_bytes(pid: int) -> int:
    """The resident memory of a process."""
    if sys.platform == "linux":
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * 4096
    return int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True).stdout) * 1024


def waiting_s(pid: int) -> float:
    """How long the threads of a process have been ready to run without a core, in all; 0 where nobody tells."""
    ticks = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            ticks += int(file.read_text().split()[1])
    return ticks / 1e9


def descriptors(pid: int) -> int | None:
    """How many file descriptors a process has open; None where the system does not tell."""
    directory = Path(f"/proc/{pid}/fd")
    return len(list(directory.iterdir())) if directory.is_dir() else None


def settled(read: Callable[[], int | None], wanted: int | None, seconds: float = 5.0) -> int | None:
    """What `read` gives once it is at most `wanted`, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while (value := read()) is not None and wanted is not None and value > wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return value
