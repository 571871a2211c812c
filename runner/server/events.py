"""What has changed since a page was told last, as server-sent events."""

from collections.abc import Callable

import msgspec

from protocol.stats import Stats
from runner.server.board import Board

STATS_S, CACHE_S, HEARTBEAT_S = 0.5, 1.0, 15.0
"""The least time between two events of a kind, and the most between any two."""
_HEARTBEAT = b": nothing new\n\n"
_encode = msgspec.json.Encoder().encode


class News:
    """What one page has been told, and what it is to be told next. Owner: whoever writes to that page."""

    def __init__(self, board: Board, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._board = board
        self._clock = clock
        self._stats: Stats | None = None
        self._mark: tuple[int, ...] | None = None
        self._cache_s = self._told_s = float("-inf")

    async def next(self) -> bytes:
        """The events there are now, maybe none. To be asked every `STATS_S`."""
        published = await self._board.numbers()
        now = self._clock()
        frames = []
        stats = msgspec.structs.replace(published.stats, uptime_s=0.0)  # that alone is no news
        if stats != self._stats:
            self._stats = stats
            frames.append(_frame("stats", published.stats))
        if published.mark != self._mark and now - self._cache_s >= CACHE_S:
            self._mark, self._cache_s = published.mark, now
            frames.append(_frame("cache", await self._board.picture()))
        if not frames and now - self._told_s >= HEARTBEAT_S:
            frames.append(_HEARTBEAT)
        if frames:
            self._told_s = now
        return b"".join(frames)


def _frame(event: str, data: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), _encode(data))
