"""Keeps the engine's latest numbers for all clients of the endpoints."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from protocol.stats import CacheNode, CachePicture
from runner.engine.engine import Engine

if TYPE_CHECKING:
    from runner.engine.parts import Parts
    from runner.numbers.journal import EngineStats


class StatsCache:
    """The latest numbers of the engine. Owner: the event loop.

    The engine is asked once for all clients that wait, and answers between two slices. If the answer takes longer than
    `patience_s`, the clients get the previous numbers, unless there are none.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        patience_s: float = 1.0,
        fresh_s: float = 0.2,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Clients get numbers that are younger than `fresh_s` without a question to the engine."""
        self._engine = engine
        self._patience_s = patience_s
        self._fresh_s = fresh_s
        self._clock = clock
        self._asking: asyncio.Future[EngineStats] | None = None
        self._last: EngineStats | None = None
        self._last_s = 0.0
        self._drawing = asyncio.Lock()
        self._mark: tuple[int, ...] | None = None
        self._nodes: list[CacheNode] = []
        self._generation = 0

    async def published(self) -> "EngineStats":
        """Returns all numbers. Asks the engine if the latest are older than `fresh_s`."""
        if self._last is None or self._clock() - self._last_s >= self._fresh_s:
            await self._ask()
        assert self._last is not None
        stats, engine = self._last.stats, self._engine
        refused, failed = stats.requests.refused + engine.refused, stats.requests.failed + engine.failed
        requests = msgspec.structs.replace(stats.requests, refused=refused, failed=failed)
        return self._last._replace(stats=msgspec.structs.replace(stats, requests=requests))

    async def cache_picture(self) -> CachePicture:
        """Returns the nodes of the cache. Asks the engine for them only if the mark of the cache has changed."""
        published = await self.published()
        async with self._drawing:
            if published.cache_mark != self._mark:
                self._nodes = await self._engine.ask(engine_nodes)
                self._mark = published.cache_mark
                self._generation += 1
            return CachePicture(generation=self._generation, kind=published.stats.cache_kind, nodes=self._nodes)

    async def _ask(self) -> None:
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._engine.ask(engine_stats))
            self._asking.add_done_callback(self._take)
        asking = self._asking
        with suppress(TimeoutError):
            async with asyncio.timeout(None if self._last is None else self._patience_s):
                await asyncio.shield(asking)

    def _take(self, answered: "asyncio.Future[EngineStats]") -> None:
        self._asking = None
        if not answered.cancelled() and answered.exception() is None:
            self._last = answered.result()
            self._last_s = self._clock()


def engine_stats(parts: "Parts") -> "EngineStats":
    """Returns all numbers. Runs on the engine thread, the only thread that may import MLX."""
    from runner.numbers.wing import collect

    return collect(parts)


def engine_nodes(parts: "Parts") -> list[CacheNode]:
    """Returns the nodes of the cache. Runs on the engine thread."""
    from runner.numbers.wing import draw_cache

    return draw_cache(parts)
