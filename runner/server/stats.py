"""`GET /v1/stats`, `/v1/cache`, `/v1/events` and `/metrics`: the runner's numbers and the contents of its cache."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from protocol.stats import CacheNode, CachePicture, Stats
from runner.engine.engine import Engine
from runner.engine.journal import EngineStats

if TYPE_CHECKING:
    from runner.server.metrics import Exporter

# --- The engine's latest numbers on the event loop's side, asked for only when a client asks.

_PATIENCE_S = 1.0
_FRESH_S = 0.2


class StatsCache:
    """The numbers that the engine published last. Owner: the event loop.

    The engine answers between two slices, and all clients share one question to it. If a slice takes longer than
    `patience_s`, clients get the previous numbers again, if there are any.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        patience_s: float = _PATIENCE_S,
        fresh_s: float = _FRESH_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Numbers younger than `fresh_s` are served without asking the engine."""
        self.refused = 0
        """The number of requests that were refused before they reached the engine."""
        self.failed = 0
        """The number of those that failed before."""
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

    async def published(self) -> EngineStats:
        """Returns all numbers."""
        if self._last is None or self._clock() - self._last_s >= self._fresh_s:
            await self._ask()
        assert self._last is not None
        stats = self._last.stats
        refused, failed = stats.requests.refused + self.refused, stats.requests.failed + self.failed
        requests = msgspec.structs.replace(stats.requests, refused=refused, failed=failed)
        return self._last._replace(stats=msgspec.structs.replace(stats, requests=requests))

    async def cache_picture(self) -> CachePicture:
        """Returns the contents of the cache. Asks the engine only if they may have changed: at most once for each
        publication of numbers, however often clients ask."""
        published = await self.published()
        async with self._drawing:
            if published.cache_mark != self._mark:
                self._nodes = await self._engine.cache_nodes()
                self._mark = published.cache_mark
                self._generation += 1
            return CachePicture(generation=self._generation, kind=published.stats.cache_kind, nodes=self._nodes)

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
            self._last = answered.result()
            self._last_s = self._clock()


# --- Server-sent events for pages: the numbers and the cache, whenever they have changed.

STATS_S, CACHE_S, HEARTBEAT_S = 0.5, 1.0, 15.0
"""The least time between two events of a kind, and the most between any two."""
_HEARTBEAT = b": nothing new\n\n"
_encode = msgspec.json.Encoder().encode


class Seen(msgspec.Struct):
    """The versions of the events that one page has got. Owner: the response to that page."""

    stats: int = 0
    cache: int = 0
    last_s: float = float("-inf")


class EventFeed:
    """The events, made once for all pages, and only while a page is open. Owner: the event loop."""

    def __init__(self, board: StatsCache, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._stats_cache = board
        self._clock = clock
        self._making = asyncio.Lock()
        self._refreshed_s = float("-inf")
        self._stats: Stats | None = None
        self._stats_frame = b""
        self._stats_version = 0
        self._mark: tuple[int, ...] | None = None
        self._cache_sent_s = float("-inf")
        self._cache_frame = b""
        self._cache_version = 0

    async def new_events(self, seen: Seen) -> bytes:
        """Returns the events that a page has not got yet, maybe none. A page asks every `STATS_S`."""
        async with self._making:
            if self._clock() - self._refreshed_s >= STATS_S:
                await self._refresh()
        now = self._clock()
        frames = []
        if seen.stats != self._stats_version:
            seen.stats = self._stats_version
            frames.append(self._stats_frame)
        if seen.cache != self._cache_version:
            seen.cache = self._cache_version
            frames.append(self._cache_frame)
        if not frames and now - seen.last_s >= HEARTBEAT_S:
            frames.append(_HEARTBEAT)
        if frames:
            seen.last_s = now
        return b"".join(frames)

    async def _refresh(self) -> None:
        published = await self._stats_cache.published()
        self._refreshed_s = self._clock()
        stats = msgspec.structs.replace(published.stats, uptime_s=0.0)  # which alone is not worth an event
        self._stats_frame = _frame("stats", published.stats)
        if stats != self._stats:
            self._stats = stats
            self._stats_version += 1
        if published.cache_mark != self._mark and self._refreshed_s - self._cache_sent_s >= CACHE_S:
            self._mark = published.cache_mark
            self._cache_sent_s = self._refreshed_s
            self._cache_frame = _frame("cache", await self._stats_cache.cache_picture())
            self._cache_version += 1


def _frame(event: str, data: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), _encode(data))


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
        """Adds the routes."""
        for path, get in zip(PATHS, (self._stats, self._cache, self._events, self._metrics), strict=True):
            router.add_get(path, get, allow_head=get != self._events)  # its head would never end

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
