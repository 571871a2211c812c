"""Server-sent events for pages: the numbers and the cache, whenever they have changed."""

import asyncio
from collections.abc import Callable

import msgspec

from protocol.stats import Stats
from runner.numbers.stats_cache import StatsCache

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
