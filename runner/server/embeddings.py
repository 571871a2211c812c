"""`POST /v1/embeddings`: the embedding of one text, in one JSON object.

Every text is a request of its own; those that wait for the engine at the same time are computed together. Checks come
in the order of Ollama's runner (docs/internals/wire.md, 12).
"""

import asyncio
from collections.abc import Generator, Iterator, Sequence
from http import HTTPStatus
from math import hypot

from aiohttp import web

from protocol import BadRequestError
from protocol.embeddings import EmbeddingsRequest, decode_embeddings, decode_media, embedding_body, kind_of
from runner.engine.engine import Engine
from runner.engine.ports import EmbeddingSizes, TextToEmbed
from runner.errors import RequestError
from runner.server.request_body import Body, RequestBodies
from runner.server.tokenize import TokenizeThreads
from runner.tokenizer import PART_CHARACTERS, Tokenizer

MOST_BODY_BYTES = 32 << 20
_END = object()
_TOWERS = {
    "image": "model has no vision tower but media contains an image",
    "audio": "model has no audio tower but media contains audio",
}


class EmbeddingsEndpoint:
    """Checks and tokenizes off the event loop, and has the engine compute."""

    def __init__(self, engine: Engine, threads: TokenizeThreads, bodies: RequestBodies) -> None:
        self._engine = engine
        self._threads = threads
        self._bodies = bodies

    async def post(self, http: web.Request) -> web.Response:
        """Answers with the embedding. The server cancels this when the client disconnects, and then nothing more is
        computed for it."""
        if self._engine.embedder is None:
            raise RequestError("this model does not support embeddings", HTTPStatus.NOT_IMPLEMENTED)
        with self._bodies.body() as held:
            body = Body()
            await held.read(http, MOST_BODY_BYTES, body.take)
            steps = _checked(body.chunks, self._engine)
            text, wanted = TextToEmbed([]), 0
            while (step := await self._threads.run(body.size, next, steps, _END)) is not _END:
                if isinstance(step, tuple):
                    text, wanted = step
        self._engine.embed(text)
        embedding = await asyncio.wrap_future(text.found)
        body_bytes = embedding_body(shortened(embedding, wanted), len(text.tokens))
        return web.Response(body=body_bytes, content_type="application/json")


def shortened(embedding: Sequence[float], dimensions: int) -> Sequence[float]:
    """Returns the first numbers of an embedding, made of length 1 again; all of them for 0."""
    if not dimensions:
        return embedding
    kept = embedding[:dimensions]
    length = max(hypot(*kept), 1e-12)
    return [each / length for each in kept]


def _checked(chunks: Sequence[bytes], engine: Engine) -> Iterator[tuple[TextToEmbed, int] | None]:
    """Yields the text with the size that is wanted of its embedding, and None before where others may have a turn.
    Raises RequestError, in the words that hosts know."""
    embedder, (context_length, vocab_size) = engine.embedder, engine.limits
    assert embedder is not None
    try:
        wanted = decode_embeddings(b"".join(chunks))
    except BadRequestError:
        raise RequestError("Bad Request") from None
    if not wanted.content and not wanted.media:
        raise RequestError("empty content")
    dimensions = _dimensions(wanted.dimensions, embedder.sizes)
    _refuse_media(wanted, embedder.sizes)
    tokens = yield from _tokens(wanted.content, engine.tokenizer, context_length)
    if not tokens:
        raise RequestError("empty token sequence")
    _refuse_long(len(tokens), context_length)
    if max(tokens) >= vocab_size > 0:
        raise RequestError(f"the model has no token {max(tokens)}: its vocabulary has {vocab_size}")
    if text := embedder.refusal(len(tokens)):
        raise RequestError(text, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    yield TextToEmbed(tokens), dimensions


def _dimensions(wanted: int, sizes: EmbeddingSizes) -> int:
    """Returns to how many numbers an embedding is cut; 0 if it is not. Raises RequestError."""
    if wanted <= 0:
        return 0
    if sizes.listed and wanted not in sizes.listed:
        listed = " ".join(map(str, sizes.listed))
        raise RequestError(f"dimensions {wanted} not supported; valid values are [{listed}]")
    if wanted >= sizes.full:
        raise RequestError(f"dimensions {wanted} exceeds the model's embedding dimension {sizes.full}")
    return wanted


def _refuse_media(wanted: EmbeddingsRequest, sizes: EmbeddingSizes) -> None:
    """Raises RequestError for media: what is wrong with them, or that they cannot be embedded yet."""
    try:
        kinds = [kind_of(decode_media(index, coded)) for index, coded in enumerate(wanted.media)]
    except BadRequestError as error:
        raise RequestError(str(error)) from None
    for index, kind in enumerate(kinds):
        if not kind:
            raise RequestError(f"media[{index}]: not a PNG/JPEG/GIF/WebP or wav/ogg blob")
        if kind not in sizes.towers:
            raise RequestError(_TOWERS[kind])
    if kinds:
        why = "media embedding not supported on this model: this runner embeds texts alone"
        raise RequestError(why, HTTPStatus.NOT_IMPLEMENTED)


def _tokens(text: str, tokenizer: Tokenizer, most: int) -> Generator[None, None, list[int]]:
    """Returns the tokens of a text, with those that begin and end one, whatever prompts get. Yields None after a part
    of a long text. Raises RequestError once there are too many."""
    first = [tokenizer.bos] if tokenizer.bos is not None else []
    last = [tokenizer.end] if tokenizer.end is not None else []
    if len(text) <= PART_CHARACTERS:
        return [*first, *tokenizer.encode_without_bos(text), *last]
    tokens: list[int] = []
    for part in tokenizer.encode_parts([text]):
        tokens += part
        _refuse_long(len(tokens), most)
        yield
    return [*first, *tokens[tokenizer.add_bos :], *last]


def _refuse_long(count: int, most: int) -> None:
    if count > most:
        text = f"the input length ({count} tokens) exceeds the context length ({most})"
        raise RequestError(text, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
