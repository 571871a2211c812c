"""The engine's latest numbers on the event loop's side, asked for only when a client asks."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

import msgspec

from protocol.stats import CacheNode, CachePicture
from runner.engine.engine import Engine
from runner.engine.observe.counters import EngineStats

_PATIENCE_S = 1.0
_FRESH_S = 0.2


class StatsCache:
    """The numbers that the engine published last. Owner: the event loop.

    The engine answers between two slices, and all clients share one question to it. If a slice takes longer than
    `patience_s`, clients get the previous numbers once more, if there are any.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        patience_s: float = _PATIENCE_S,
        fresh_s: float = _FRESH_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Numbers younger than `fresh_s` are served without another question to the engine."""
        self.refused = 0
        """The number of requests that were refused before they reached the engine."""
        self._engine = engine
        self._patience_s = patience_s
        self._fresh_s = fresh_s
        self._clock = clock
        self._asking: asyncio.Future[EngineStats] | None = None
        self._last: EngineStats | None = None
        self._last_s = 0.0
        self._nodes: list[CacheNode] = []
        self._generation = 0

    async def published(self) -> EngineStats:
        """Returns all numbers."""
        if self._last is None or self._clock() - self._last_s >= self._fresh_s:
            await self._ask()
        assert self._last is not None
        stats = self._last.stats
        requests = msgspec.structs.replace(stats.requests, refused=stats.requests.refused + self.refused)
        return self._last._replace(stats=msgspec.structs.replace(stats, requests=requests))

    async def cache_picture(self) -> CachePicture:
        """Returns the contents of the cache. Waits as long as the engine's slice takes."""
        nodes = await self._engine.cache_nodes()
        if nodes != self._nodes or not self._generation:
            self._nodes = nodes
            self._generation += 1
        kind = (await self.published()).stats.cache_kind
        return CachePicture(generation=self._generation, kind=kind, nodes=nodes)

    async def _ask(self) -> None:
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._engine.collect_stats())
            self._asking.add_done_callback(self._take)
        asking = self._asking
        with suppress(TimeoutError):
            async with asyncio.timeout(None if self._last is None else self._patience_s):
                await asyncio.shield(asking)

    def _take(self, answered: "asyncio.Future[EngineStats]") -> None:
        self._asking = None
        if not answered.cancelled() and answered.exception() is None:
            self._last, self._last_s = answered.result(), self._clock()
