"""The memory and latency of a runner under load, sampled from a thread of its own, and its metrics, scraped as a
monitoring system does.
"""

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

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from scripts.tools.host.lib import Client, Process, UndecodableError
from scripts.tools.host.lib.answers import decode_status
from scripts.tools.host.lib.usage import rss_bytes

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
        """In bytes."""
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


_EVERY_S = 1.0
_LEAVING_S = 10.0
"""The longest that requests may take to end once their clients have gone."""
_LOOK_S = 0.05
_GROWING = ("_total", "_bucket", "_count", "_sum")

Samples = dict[tuple[str, ...], float]
"""By the name and the values of the labels."""


class Scraper:
    """Reads `/metrics` once a second. `faults` holds one text for each thing that was not as it should be."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._last: Samples = {}
        self.scrapes = 0
        self.faults: list[str] = []

    async def run(self) -> None:
        while True:
            try:
                if not await self.scrape():
                    return
            except (aiohttp.ClientError, OSError) as error:
                self.faults.append(f"metrics: {type(error).__name__}: {error}")
            await asyncio.sleep(_EVERY_S)

    async def scrape(self) -> bool:
        """Scrapes once; returns False if there is no such endpoint, which not every runner has."""
        reply = await self._client.send("GET", "/metrics")
        if reply.status == 404:
            return False
        if reply.status != 200:
            self.faults.append(f"metrics: {reply.status} {reply.text}")
            return True
        try:
            self.take(samples(reply.text))
        except ValueError as error:
            self.faults.append(f"metrics: {error}")
        return True

    async def scrape_last(self) -> bool:
        """Scrapes once all clients are gone, and again while a request runs or waits that one of them has left. Returns
        as `scrape` does."""
        until_s = time.monotonic() + _LEAVING_S
        while await self.scrape():
            if not self._requests or time.monotonic() > until_s:
                return True
            await asyncio.sleep(_LOOK_S)
        return False

    @property
    def _requests(self) -> float:
        """The requests that run or wait."""
        return sum(self._last.get((f"mlx_runner_requests_{state}",), 0.0) for state in ("running", "queued"))

    def take(self, found: Samples) -> None:
        """Takes in the samples of a scrape. Counters must not have fallen, and no sample may be gone."""
        self.scrapes += 1
        for name, value in self._last.items():
            if name[0].endswith(_GROWING) and found.get(name, -1.0) < value:
                self.faults.append(f"metrics: {' '.join(name)} went from {value:g} to {found.get(name)}")
        self._last = found

    def check(self, answers: int) -> None:
        """Checks the last scrape: that many answers were given, and no request runs or waits any more."""
        ended = sum(self._last.get(("mlx_runner_requests_total", how), 0.0) for how in ("done", "length"))
        if self.scrapes and ended < answers:
            self.faults.append(f"metrics: {ended:.0f} answers ended where clients got {answers}")
        if self._requests:
            self.faults.append(f"metrics: {self._requests:.0f} requests run or wait when all clients are gone")


def samples(text: str) -> Samples:
    """Returns all samples of a scrape. ValueError if the text is not in Prometheus' format."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
