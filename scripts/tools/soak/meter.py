"""The memory and latency of a runner under load, sampled from a thread of its own, and its metrics after it."""

import asyncio
import contextlib
import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from scripts.tools.host.lib import Client, Process, UndecodableError, rss_bytes
from scripts.tools.host.lib.answers import decode_status

QUICK_S = 0.1
"""The longest time that hosts may wait for a status."""
_PERIOD_S = 0.05
_RSS_EVERY = 5
_WARM, _LATE = 0.4, 0.8  # shares of the work: what grows until the first is warm-up, the end begins at the second
_WINDOW = 0.2


class Trend(NamedTuple):
    """A quantity after the warm-up and at the end, in bytes, and how many answers came between."""

    warm: float
    late: float
    answers: float

    @classmethod
    def of(cls, samples: Sequence[tuple[int, float]]) -> "Trend | None":
        """Of pairs of answers so far and bytes; None where there are too few. Medians over a fifth of the answers each,
        so that no single sample counts."""
        if not samples:
            return None
        start, end = samples[0][0], samples[-1][0]

        def window(share: float) -> list[float]:
            begins = start + (end - start) * share
            return [value for at, value in samples if begins <= at <= begins + (end - start) * _WINDOW]

        warm, late = window(_WARM), window(_LATE)
        if start == end or not warm or not late:
            return None
        return cls(median(warm), median(late), (end - start) * (_LATE - _WARM))

    @property
    def growth(self) -> float:
        return self.late - self.warm


class Meter(threading.Thread):
    """Asks for the status twenty times a second and notes the resident memory, until it is stopped.

    `answers` tells how many have come so far. `latencies` are seconds; `own` are the same without the time in which the
    runner's event loop or this thread was ready to run and had no core. `rss` and `memory` are pairs of answers and
    bytes, `faults` what went wrong.
    """

    def __init__(self, process: Process, answers: Callable[[], int]) -> None:
        super().__init__(name="meter", daemon=True)
        self.latencies: list[float] = []
        self.own: list[float] = []
        self.rss: list[tuple[int, float]] = []
        self.memory: list[tuple[int, float]] = []
        self.faults: list[str] = []
        self._process = process
        self._answers = answers
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
        waited, started = self._waiting_s(), time.monotonic()
        connection.request("GET", "/v1/status")
        status = decode_status(connection.getresponse().read())
        took = time.monotonic() - started
        self.latencies.append(took)
        self.own.append(max(took - (self._waiting_s() - waited), 0.0))
        answers = self._answers()
        self.memory.append((answers, status.memory))
        if len(self.latencies) % _RSS_EVERY == 1:
            self.rss.append((answers, rss_bytes(self._process.pid)))

    def _waiting_s(self) -> float:
        """Returns the seconds that the runner's event loop and this thread have waited for a core."""
        return waiting_s(self._process.pid, self._process.pid) + waiting_s(os.getpid(), threading.get_native_id())

    def stop(self) -> None:
        self._stopped.set()
        self.join(20)


class Told(NamedTuple):
    """A runner's own report of its memory, in bytes."""

    weights: int
    peak: int


def memory_told(port: int) -> Told:
    """Returns the memory statistics of the runner at this port. Raises OSError or HTTPException if none answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/stats")
        memory = json.loads(connection.getresponse().read())["memory"]
    return Told(memory["weights_bytes"], memory["peak_bytes"])


def waiting_s(pid: int, thread: int) -> float:
    """Returns the seconds that a thread has been ready to run without a core; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def settled(read: Callable[[], int | None], wanted: int | None, seconds: float = 5.0) -> int | None:
    """Returns the value of `read` once it is at most `wanted`, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while (value := read()) is not None and wanted is not None and value > wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


_LEAVING_S = 10.0
"""The longest that requests may take to end once their clients have gone."""
_LOOK_S = 0.05


async def metrics_faults(client: Client, answers: int) -> list[str]:
    """Scrapes `/metrics` once all clients are gone. Returns a text for each thing that is not as it should be.

    As many requests ended as clients got answers, and none runs or waits any more. Not every runner has metrics.
    """
    until_s = time.monotonic() + _LEAVING_S
    while True:
        reply = await client.send("GET", "/metrics")
        if reply.status == 404:
            return []
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(reply.text)
            for sample in family.samples
        }
        left = sum(found[f"mlx_runner_requests_{state}",] for state in ("running", "queued"))
        if not left or time.monotonic() > until_s:
            break
        await asyncio.sleep(_LOOK_S)
    ended = sum(found.get(("mlx_runner_requests_total", how), 0.0) for how in ("done", "length"))
    faults = [f"metrics: {left:.0f} requests run or wait when all clients are gone"] if left else []
    if ended < answers:
        faults.append(f"metrics: {ended:.0f} answers ended where clients got {answers}")
    return faults
