"""The bodies of requests, read in pieces as they arrive, and refused as soon as they cannot be served."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from time import perf_counter

from aiohttp import web

from protocol import BadRequestError
from runner.errors import RequestError

MOST_TOGETHER_BYTES = 512 << 20
_PIECE_BYTES = 1 << 13
_TURN_S = 0.005
_STALLED_S = 60.0


class RequestBodies:
    """All bodies that are held in memory, with the pictures of running requests. Owner: the event loop.

    A body may take as much as all bodies together leave free, so that large ones never keep small ones out.
    """

    def __init__(self, most_bytes: int = MOST_TOGETHER_BYTES) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        """The bytes of all bodies at present."""
        self.decoding = asyncio.Lock()
        """Held while a piece is decoded: of several bodies that arrive at once, one is decoded at a time."""

    @contextmanager
    def body(self) -> Iterator["RequestBody"]:
        """Adds a body, which counts until the block ends."""
        body = RequestBody(self)
        try:
            yield body
        finally:
            body.hold(0)


class RequestBody:
    """One body."""

    def __init__(self, bodies: RequestBodies) -> None:
        self._bodies = bodies
        self._held_bytes = 0

    async def read(self, http: web.Request, most_bytes: int, take: Callable[[bytes], int]) -> None:
        """Passes the body to `take` in pieces; `take` returns how many bytes it holds by then.

        Raises:
            BadRequestError: the body is compressed, which no host does: a megabyte may stand for a gigabyte.
            RequestError: it has more than `most_bytes`, by its header or by count; nothing arrives for a minute; or
                there is no room for it beside the other bodies.
        """
        if http.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise BadRequestError("the body has a Content-Encoding, which is not supported: send it uncompressed")
        _refuse_large(http.content_length or 0, most_bytes)
        size = 0
        while chunk := await _next(http):
            size += len(chunk)
            _refuse_large(size, most_bytes)
            async with self._bodies.decoding:
                await self._give(chunk, take)

    async def _give(self, chunk: bytes, take: Callable[[bytes], int]) -> None:
        until = perf_counter() + _TURN_S
        for start in range(0, len(chunk), _PIECE_BYTES):
            if perf_counter() > until:
                await asyncio.sleep(0)  # lets everything else run
                until = perf_counter() + _TURN_S
            self.hold(take(chunk[start : start + _PIECE_BYTES]))

    def hold(self, size: int) -> None:
        """Sets how many bytes the body holds. RequestError if all bodies together leave less than that free."""
        bodies = self._bodies
        bodies.held_bytes += size - self._held_bytes
        self._held_bytes = size
        if size > bodies.most_bytes - bodies.held_bytes:
            raise RequestError(
                f"other requests and their pictures fill the limit of {bodies.most_bytes >> 20} MiB: send this one"
                " again in a moment, or make it shorter",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )


class Body:
    """A body as it arrived."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.size = 0

    def take(self, piece: bytes) -> int:
        self.chunks.append(piece)
        self.size += len(piece)
        return self.size


async def _next(http: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_STALLED_S):
            return await http.content.readany()
    except TimeoutError:
        raise RequestError(
            f"the request has stalled: no data arrived for {_STALLED_S:.0f} seconds", HTTPStatus.REQUEST_TIMEOUT
        ) from None


def _refuse_large(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise RequestError(
            f"the request has {size} bytes or more; the limit is {most_bytes}: shorten its prompt or its media",
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )
