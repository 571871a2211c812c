"""`POST /v1/tokenize` turns plain text into a JSON array of token ids; `POST /v1/detokenize` turns ids into text."""

from codecs import iterdecode
from collections.abc import Iterator, Sequence

import msgspec
from aiohttp import web

from protocol.refusal import decoded
from runner.engine.engine import Engine
from runner.server.intake import Incoming, Intake

MOST_TEXT_BYTES = 256 << 20
MOST_IDS_BYTES = 8 << 20
"""The most bytes of a JSON array of ids: more than the ids of the longest context."""
_ID_BYTES = 16
"""The bytes of memory that ids take for each byte of their JSON."""
_IDS = msgspec.json.Decoder(list[int] | None)


class TokenizeEndpoint:
    """Tokenizes on other threads, part by part, so that a request waits at most for one part of another long text."""

    def __init__(self, engine: Engine, intake: Intake) -> None:
        self._engine = engine
        self._intake = intake

    async def post(self, http: web.Request) -> web.StreamResponse:
        """Responds with the ids of the text in the body. Sends each part as soon as the next part is computed.

        A host that reads the closing bracket closes the connection unless the end of the response has also arrived. So
        the bracket and the end are sent together.
        """
        with Incoming(self._intake, self._engine.vision) as incoming:
            await incoming.read_all(http, MOST_TEXT_BYTES)
            return await self._respond(http, incoming.size, self._ids(incoming.chunks))

    async def post_ids(self, http: web.Request) -> web.StreamResponse:
        """Responds with the text of the ids in the body, special tokens included. Leaves out ids that the vocabulary
        lacks."""
        with Incoming(self._intake, self._engine.vision) as incoming:
            await incoming.read_all(http, MOST_IDS_BYTES, _ID_BYTES)
            return await self._respond(http, incoming.size, self._text(incoming.chunks))

    async def _respond(self, http: web.Request, size: int, pieces: Iterator[bytes]) -> web.StreamResponse:
        """Sends each piece as soon as the next piece is known, and the last piece with the end of the response."""
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        last = await self._intake.run(size, next, pieces, b"")
        while piece := await self._intake.run(size, next, pieces, b""):
            if not response.prepared:
                await response.prepare(http)
            await response.write(last)
            last = piece
        if not response.prepared:
            return web.Response(body=last, content_type="application/json")
        await response.write_eof(last)
        return response

    def _ids(self, chunks: Sequence[bytes]) -> Iterator[bytes]:
        """Yields the JSON array of ids in pieces. Bytes that are not UTF-8 count as U+FFFD."""
        piece = b""
        for ids in self._engine.tokenizer.encode_parts(iterdecode(chunks, "utf-8", "surrogateescape")):
            if ids:
                if piece:
                    yield piece
                piece = (b"," if piece else b"[") + msgspec.json.encode(ids)[1:-1]
        yield (piece or b"[") + b"]"

    def _text(self, chunks: Sequence[bytes]) -> Iterator[bytes]:
        """Yields a JSON string in pieces. Bytes that are not UTF-8 become U+FFFD. Raises BadRequestError."""
        ids = decoded(_IDS, b"".join(chunks)) or []
        piece = b'"'
        for text in self._engine.tokenizer.decode_parts(ids):
            if text:
                yield piece
                piece = msgspec.json.encode(text)[1:-1]
        yield piece + b'"'
