"""`POST /v1/tokenize`: plain text in, a JSON array of ids out."""

from codecs import iterdecode
from collections.abc import Iterator, Sequence

import msgspec
from aiohttp import web

from runner.engine.engine import Engine
from runner.server.request_body import MOST_MEDIA_BYTES, Bodies
from runner.server.tokenize_threads import TokenizeThreads


class TokenizeEndpoint:
    """Tokenizes off the event loop, a part at a time: behind a very long text nobody waits longer than for a part."""

    def __init__(self, engine: Engine, lanes: TokenizeThreads, bodies: Bodies) -> None:
        self._engine = engine
        self._lanes = lanes
        self._bodies = bodies

    async def post(self, http: web.Request) -> web.StreamResponse:
        """The ids of the body, each part sent when it is there.

        A host reads as far as the closing bracket and then closes the connection, unless it has seen the end of the
        body by then: the bracket is never sent before it.
        """
        with self._bodies.body() as body:
            text = _Text()
            await body.read(http, MOST_MEDIA_BYTES, text.take)
            pieces = self._pieces(text.chunks)
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            last = await self._lanes.run(text.size, next, pieces, b"")
            while piece := await self._lanes.run(text.size, next, pieces, b""):
                if not response.prepared:
                    await response.prepare(http)
                await response.write(last)
                last = piece
        if not response.prepared:
            return web.Response(body=last, content_type="application/json")
        await response.write_eof(last)
        return response

    def _pieces(self, chunks: Sequence[bytes]) -> Iterator[bytes]:
        """The array as text, in pieces; the bracket ends the last one. Bytes that are no UTF-8 count as U+FFFD."""
        piece = b""
        for ids in self._engine.tokenizer.encode_parts(iterdecode(chunks, "utf-8", "surrogateescape")):
            if ids:
                if piece:
                    yield piece
                piece = (b"," if piece else b"[") + msgspec.json.encode(ids)[1:-1]
        yield (piece or b"[") + b"]"


class _Text:
    """A body as it came."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.size = 0

    def take(self, piece: bytes) -> int:
        self.chunks.append(piece)
        self.size += len(piece)
        return self.size
