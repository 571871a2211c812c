"""`GET /v1/stats`, `/v1/cache`, `/v1/events` and `/metrics`: the numbers and the cache of the runner. `GET /`: the page
that draws both in a browser."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from protocol.stats import Stats
from runner.engine.engine import Engine
from runner.numbers.stats_cache import StatsCache

if TYPE_CHECKING:
    from runner.numbers.journal import EngineStats  # imports MLX, as only the engine thread may

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # The page may only load files from this runner and send requests to it. The browser parses no text as markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",  # the next runner on this port may have another version
}
STATS_S, CACHE_S, HEARTBEAT_S = 0.5, 1.0, 15.0
"""The least seconds between two `stats` events and between two `cache` events, and the most without any event."""
_HEARTBEAT = b": nothing new\n\n"
_encode = msgspec.json.Encoder().encode
Sleep = Callable[[float], Awaitable[object]]


class EventFeed:
    """Makes the server-sent events for one client: `stats` and `cache`, each after a change. Owner: the event loop."""

    def __init__(self, stats_cache: StatsCache, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._stats_cache = stats_cache
        self._clock = clock
        # The last numbers and mark that were sent, and the times of sending.
        self._stats: Stats | None = None
        self._mark: tuple[int, ...] | None = None
        self._cache_sent_s = self._sent_s = float("-inf")

    async def new_events(self) -> bytes:
        """Returns the events since the last call, or no bytes if nothing has changed. Call this every `STATS_S`."""
        published, frames = await self._stats_cache.published(), []
        now_s = self._clock()
        stats = msgspec.structs.replace(published.stats, uptime_s=0.0)  # without the one field that always changes
        if stats != self._stats:
            self._stats = stats
            frames.append(_frame("stats", published.stats))
        if published.cache_mark != self._mark and now_s - self._cache_sent_s >= CACHE_S:
            self._mark, self._cache_sent_s = published.cache_mark, now_s
            frames.append(_frame("cache", await self._stats_cache.cache_picture()))
        if not frames and now_s - self._sent_s >= HEARTBEAT_S:
            frames.append(_HEARTBEAT)
        if frames:
            self._sent_s = now_s
        return b"".join(frames)


def _frame(event: str, data: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), _encode(data))


class StatsEndpoints:
    """The endpoints for the numbers and the page. They ask the engine only when a client asks them."""

    def __init__(
        self,
        engine: Engine,
        helper: Executor,
        *,
        clock: Callable[[], float] = monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._stats_cache = StatsCache(engine, clock=clock)
        self._clock = clock
        self._helper = helper
        self._sleep = sleep

    @property
    def routes(self) -> Iterator[web.RouteDef]:
        """Yields the routes of the numbers and of the page."""
        yield web.get("/v1/stats", self._stats)
        yield web.get("/v1/cache", self._cache)
        yield web.get("/v1/events", self._events, allow_head=False)  # the answer to HEAD would never end
        yield web.get("/metrics", self._metrics)
        yield from PAGE

    async def _stats(self, _: web.Request) -> web.Response:
        return _json((await self._stats_cache.published()).stats)

    async def _cache(self, _: web.Request) -> web.Response:
        return _json(await self._stats_cache.cache_picture())

    async def _events(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        feed = EventFeed(self._stats_cache, self._clock)
        with suppress(ConnectionError):  # the client has left
            await response.prepare(http)
            while True:
                if frames := await feed.new_events():
                    await response.write(frames)
                await self._sleep(STATS_S)
        return response

    async def _metrics(self, http: web.Request) -> web.Response:
        run = asyncio.get_running_loop().run_in_executor
        published = await self._stats_cache.published()
        body, content_type = await run(self._helper, _scrape, published, http.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})


def _scrape(published: "EngineStats", accept: str) -> tuple[bytes, str]:
    """Runs in a helper thread, since the first import of the module takes some tens of milliseconds."""
    from runner.numbers.metrics import scrape

    return scrape(published, accept)


def _json(value: msgspec.Struct) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})


async def _file(http: web.Request) -> web.Response:
    name = http.match_info.get("name", "index.html")
    for path in _FOLDER.iterdir():
        if path.name == name and (content_type := _TYPES.get(path.suffix)):
            return web.Response(body=path.read_bytes(), content_type=content_type, charset="utf-8", headers=_HEADERS)
    raise web.HTTPNotFound


PAGE = (web.get("/", _file), web.get("/page/{name}", _file))
"""The routes of the page and of the files that the page loads."""
