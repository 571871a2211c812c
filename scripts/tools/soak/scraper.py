"""A monitoring system's view of the runner: its metrics, scraped and parsed under load."""

import asyncio
import time

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from scripts.tools.host.lib import Client

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
        """Scrapes until it is cancelled."""
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
