"""What has changed since a page was told last, as server-sent events."""

import asyncio
from collections.abc import Callable

import msgspec

from protocol.stats import Stats
from runner.server.stats_cache import StatsCache

STATS_S, CACHE_S, HEARTBEAT_S = 0.5, 1.0, 15.0
"""The least time between two events of a kind, and the most between any two."""
_HEARTBEAT = b": nothing new\n\n"
_encode = msgspec.json.Encoder().encode


class Told(msgspec.Struct):
    """What one page knows, by the numbers that News gave its frames. Owner: whoever writes to that page."""

    stats: int = 0
    cache: int = 0
    last_s: float = float("-inf")


class EventFeed:
    """What there is to tell, made once for all pages, and only while there is one. Owner: the event loop."""

    def __init__(self, board: StatsCache, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._board = board
        self._clock = clock
        self._making = asyncio.Lock()
        self._made_s = self._drawn_s = float("-inf")
        self._stats: Stats | None = None
        self._mark: tuple[int, ...] | None = None
        self._stats_frame = self._cache_frame = b""
        self._stats_number = self._cache_number = 0

    async def since(self, told: Told) -> bytes:
        """The events that a page has not been told, maybe none. To be asked every `STATS_S`."""
        async with self._making:
            if self._clock() - self._made_s >= STATS_S:
                await self._make()
        now, frames = self._clock(), []
        if told.stats != self._stats_number:
            told.stats = self._stats_number
            frames.append(self._stats_frame)
        if told.cache != self._cache_number:
            told.cache = self._cache_number
            frames.append(self._cache_frame)
        if not frames and now - told.last_s >= HEARTBEAT_S:
            frames.append(_HEARTBEAT)
        if frames:
            told.last_s = now
        return b"".join(frames)

    async def _make(self) -> None:
        published = await self._board.numbers()
        self._made_s = self._clock()
        stats = msgspec.structs.replace(published.stats, uptime_s=0.0)  # that alone is no news
        self._stats_frame = _frame("stats", published.stats)
        if stats != self._stats:
            self._stats = stats
            self._stats_number += 1
        if published.mark != self._mark and self._made_s - self._drawn_s >= CACHE_S:
            self._mark, self._drawn_s = published.mark, self._made_s
            self._cache_frame = _frame("cache", await self._board.picture())
            self._cache_number += 1


def _frame(event: str, data: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), _encode(data))
