"""`POST /v1/tokenize`: plain text in, a JSON array of ids out."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor

import msgspec
from aiohttp import web

from runner.engine.engine import Engine
from runner.server.bodies import read_body


class TokenizeEndpoint:
    """Tokenizes off the event loop, a part at a time: behind a very long text nobody waits longer than for a part."""

    def __init__(self, engine: Engine, helper: Executor) -> None:
        self._engine = engine
        self._helper = helper

    async def post(self, http: web.Request) -> web.StreamResponse:
        """The ids of the body, each part sent when it is there.

        A host reads as far as the closing bracket and then closes the connection, unless it has seen the end of the
        body by then: the bracket is never sent before it.
        """
        pieces = self._pieces(await read_body(http))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        last = await self._next(pieces)
        while piece := await self._next(pieces):
            if not response.prepared:
                await response.prepare(http)
            await response.write(last)
            last = piece
        if not response.prepared:
            return web.Response(body=last, content_type="application/json")
        await response.write_eof(last)
        return response

    async def _next(self, pieces: Iterator[bytes]) -> bytes:
        """The next piece; nothing when there are no more."""
        return await asyncio.get_running_loop().run_in_executor(self._helper, next, pieces, b"")

    def _pieces(self, body: bytes) -> Iterator[bytes]:
        """The array as text, in pieces; the bracket ends the last one. Bytes that are no UTF-8 count as U+FFFD."""
        piece = b""
        for ids in self._engine.tokenizer.encode_parts(body.decode(errors="surrogateescape")):
            if ids:
                if piece:
                    yield piece
                piece = (b"," if piece else b"[") + msgspec.json.encode(ids)[1:-1]
        yield (piece or b"[") + b"]"
