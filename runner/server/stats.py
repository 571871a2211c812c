"""`GET /v1/stats`, `/v1/cache`, `/v1/events` and `/metrics`: the runner's numbers and the contents of its cache."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from runner.engine.engine import Engine
from runner.server.sse import STATS_S, EventFeed, Seen
from runner.server.stats_cache import StatsCache

if TYPE_CHECKING:
    from runner.server.metrics import Exporter

Sleep = Callable[[float], Awaitable[object]]
PATHS = ("/v1/stats", "/v1/cache", "/v1/events", "/metrics")


class StatsEndpoints:
    """Answers questions about the runner. Without a question, nothing is asked of the engine."""

    def __init__(
        self,
        engine: Engine,
        helper: Executor,
        *,
        clock: Callable[[], float] = monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.stats_cache = StatsCache(engine, clock=clock)
        self._feed = EventFeed(self.stats_cache, clock)
        self._helper = helper
        self._sleep = sleep
        self._exporter: Exporter | None = None

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        for path, get in zip(PATHS, (self._stats, self._cache, self._events, self._metrics), strict=True):
            router.add_get(path, get, allow_head=get != self._events)  # a head of which would never end

    async def _stats(self, _: web.Request) -> web.Response:
        return _json((await self.stats_cache.published()).stats)

    async def _cache(self, _: web.Request) -> web.Response:
        return _json(await self.stats_cache.cache_picture())

    async def _events(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        seen = Seen()
        with suppress(ConnectionError):  # the page was closed
            await response.prepare(http)
            while True:
                if frames := await self._feed.new_events(seen):
                    await response.write(frames)
                await self._sleep(STATS_S)
        return response

    async def _metrics(self, http: web.Request) -> web.Response:
        published = await self.stats_cache.published()
        if self._exporter is None:
            self._exporter = await asyncio.get_running_loop().run_in_executor(self._helper, _make_exporter)
        body, content_type = self._exporter.text(published, http.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})


def _make_exporter() -> "Exporter":
    """Runs off the event loop: the import takes some tens of milliseconds."""
    from runner.server.metrics import Exporter

    return Exporter()


def _json(value: msgspec.Struct) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})
