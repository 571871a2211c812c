"""The bodies of requests: read in pieces as they arrive, refused as soon as they can be of no use."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from time import perf_counter

from aiohttp import web

from runner.errors import RequestError

MOST_MEDIA_BYTES = 256 << 20
"""Of what a request may have beside its prompt. Hosts know no limit, but nobody waits for more."""
MOST_TOGETHER_BYTES = 512 << 20
_PIECE_BYTES = 1 << 13
_TURN_S = 0.005
_STALLED_S = 60.0


class Bodies:
    """All bodies that are held in memory. Owner: the event loop.

    A body may take as much as all together leave free: so large ones never keep small ones out.
    """

    def __init__(self, most_bytes: int = MOST_TOGETHER_BYTES) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        """Of all of them, now."""
        self.turn = asyncio.Lock()
        """Of several that arrive at once, one after the other is looked at."""

    @contextmanager
    def body(self) -> Iterator["Body"]:
        """One more, which counts until this ends."""
        body = Body(self)
        try:
            yield body
        finally:
            body.hold(0)


class Body:
    """One of them."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._held_bytes = 0

    async def read(self, http: web.Request, most_bytes: int, take: Callable[[bytes], int]) -> None:
        """Give it to `take` in pieces, which returns how many bytes it holds by then.

        Raises:
            RequestError: it is compressed, which no host does (a megabyte may stand for a gigabyte); it has more than
                `most_bytes`, by its own account or when they have come; nothing came for a minute; or it finds no
                room beside the others.
        """
        if http.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError("Bad Request")
        _refuse_large(http.content_length or 0, most_bytes)
        size = 0
        while chunk := await _next(http):
            size += len(chunk)
            _refuse_large(size, most_bytes)
            async with self._bodies.turn:
                await self._give(chunk, take)

    async def _give(self, chunk: bytes, take: Callable[[bytes], int]) -> None:
        until = perf_counter() + _TURN_S
        for start in range(0, len(chunk), _PIECE_BYTES):
            if perf_counter() > until:
                await asyncio.sleep(0)  # it is the turn of everything else
                until = perf_counter() + _TURN_S
            self.hold(take(chunk[start : start + _PIECE_BYTES]))

    def hold(self, size: int) -> None:
        """So many bytes of it are held from now on. RequestError where all together leave less free than that."""
        bodies = self._bodies
        bodies.held_bytes += size - self._held_bytes
        self._held_bytes = size
        if size > bodies.most_bytes - bodies.held_bytes:
            raise RequestError(
                f"the requests that are being read take up the {bodies.most_bytes >> 20} MiB there are for them:"
                " send this one again in a moment, or make it shorter",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )


async def _next(http: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_STALLED_S):
            return await http.content.readany()
    except TimeoutError:
        raise RequestError(
            f"nothing came of the request for {_STALLED_S:.0f} seconds", HTTPStatus.REQUEST_TIMEOUT
        ) from None


def _refuse_large(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise RequestError(
            f"a request has at most {most_bytes} bytes here: no longer prompt can fit, with its media",
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )
