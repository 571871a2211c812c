"""`POST /v1/tokenize`: plain text in, a JSON array of ids out."""

from codecs import iterdecode
from collections.abc import Iterator, Sequence

import msgspec
from aiohttp import web

from runner.engine.engine import Engine
from runner.server.request_body import RequestBodies
from runner.server.tokenize_threads import TokenizeThreads

MOST_TEXT_BYTES = 256 << 20


class TokenizeEndpoint:
    """Tokenizes off the event loop, a part at a time, so that no request waits longer than one part of a long text."""

    def __init__(self, engine: Engine, threads: TokenizeThreads, bodies: RequestBodies) -> None:
        self._engine = engine
        self._threads = threads
        self._bodies = bodies

    async def post(self, http: web.Request) -> web.StreamResponse:
        """Responds with the ids of the body, sending each part as soon as it is computed.

        A host reads up to the closing bracket and then closes the connection, unless it has seen the end of the
        response by then: so the bracket is sent together with the end.
        """
        with self._bodies.body() as body:
            text = _Text()
            await body.read(http, MOST_TEXT_BYTES, text.take)
            pieces = self._pieces(text.chunks)
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            last = await self._threads.run(text.size, next, pieces, b"")
            while piece := await self._threads.run(text.size, next, pieces, b""):
                if not response.prepared:
                    await response.prepare(http)
                await response.write(last)
                last = piece
        if not response.prepared:
            return web.Response(body=last, content_type="application/json")
        await response.write_eof(last)
        return response

    def _pieces(self, chunks: Sequence[bytes]) -> Iterator[bytes]:
        """Yields the array as text, in pieces, the last with the bracket. Bytes that are not UTF-8 count as U+FFFD."""
        piece = b""
        for ids in self._engine.tokenizer.encode_parts(iterdecode(chunks, "utf-8", "surrogateescape")):
            if ids:
                if piece:
                    yield piece
                piece = (b"," if piece else b"[") + msgspec.json.encode(ids)[1:-1]
        yield (piece or b"[") + b"]"


class _Text:
    """A body as it arrived."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.size = 0

    def take(self, piece: bytes) -> int:
        self.chunks.append(piece)
        self.size += len(piece)
        return self.size
