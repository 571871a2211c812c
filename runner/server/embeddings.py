"""`POST /v1/embeddings`: the embedding of one text with its media, in one JSON object.

Every text is a request of its own; those that wait for the engine at the same time are computed together. Checks come
in the order of Ollama's runner (docs/internals/wire.md, 12).
"""

import asyncio
import threading
from collections.abc import Generator, Iterator, Sequence
from http import HTTPStatus
from math import hypot

from aiohttp import web

from protocol import BadRequestError, Media
from protocol.embeddings import EmbeddingsRequest, decode_embeddings, decode_media, embedding_body, kind_of
from runner.engine.engine import Engine
from runner.engine.ports import EmbeddingSizes, TextToEmbed
from runner.engine.request import ShownPrompt, UnmeasuredError, Vision
from runner.errors import RequestError
from runner.server.completion import take_steps
from runner.server.request_body import Body, RequestBodies
from runner.server.tokenize import TokenizeThreads
from runner.tokenizer import Tokenizer

MOST_BODY_BYTES = 32 << 20
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
        if self._engine.embedder is None or self._engine.decider is not None:
            raise RequestError("this model does not support embeddings", HTTPStatus.NOT_IMPLEMENTED)
        with self._bodies.body() as held:
            body = Body()
            await held.read(http, MOST_BODY_BYTES, body.take)
            steps = _checked(body.chunks, self._engine)
            ((text, wanted),) = await take_steps(self._threads, body, steps, tuple, self._engine.vision)
            held.hold(text.shown.nbytes if text.shown is not None else 0)  # files, until they are encoded
            embedding = await self._embedding(text)
        body_bytes = embedding_body(shortened(embedding, wanted), len(text.tokens))
        return web.Response(body=body_bytes, content_type="application/json")

    async def _embedding(self, text: TextToEmbed) -> list[float]:
        """Has the media of a text decoded, and then all of it computed. Raises RequestError."""
        left, vision, shown = threading.Event(), self._engine.vision, text.shown
        try:
            for decoding in vision.decode(shown, left.is_set) if shown is not None else ():
                await asyncio.wrap_future(decoding)
            self._engine.embed(text)
            return await asyncio.wrap_future(text.found)
        finally:
            left.set()
            if shown is not None:
                vision.drop(shown)


def shortened(embedding: Sequence[float], dimensions: int) -> Sequence[float]:
    """Returns the first numbers of an embedding, made of length 1 again; all of them for 0."""
    if not dimensions:
        return embedding
    kept = embedding[:dimensions]
    length = max(hypot(*kept), 1e-12)
    return [each / length for each in kept]


def _checked(chunks: Sequence[bytes], engine: Engine) -> Iterator[tuple[TextToEmbed, int] | ShownPrompt | None]:
    """Yields the text with the size that is wanted of its embedding; before it media that have to be decoded first, and
    None where others may have a turn. Raises BadRequestError, and RequestError in the words that hosts know."""
    embedder, limits = engine.embedder, engine.limits
    assert embedder is not None
    wanted = decode_embeddings(b"".join(chunks))
    if not wanted.content and not wanted.media:
        raise RequestError("empty content")
    dimensions = _dimensions(wanted.dimensions, embedder.sizes)
    media = _media(wanted, embedder.sizes)
    tokens = yield from _tokens(wanted.content, engine.tokenizer, limits.context_length)
    shown = None
    if media:
        last = len(tokens) - (engine.tokenizer.end is not None)
        shown = yield from _joined(engine.vision, tokens[:last], media, tokens[last:])
        tokens = shown.ids
    if not tokens:
        raise RequestError("empty token sequence")
    _refuse_long(len(tokens), limits.context_length)
    most = max(tokens if shown is None else shown.keys)
    if most >= limits.vocab_size > 0:
        raise RequestError(f"the model has no token {most}: its vocabulary has {limits.vocab_size}")
    if text := embedder.refusal(len(tokens)):
        raise RequestError(text, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    yield TextToEmbed(tokens, shown), dimensions


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


def _media(wanted: EmbeddingsRequest, sizes: EmbeddingSizes) -> list[Media]:
    """Returns the media, numbered from 0. Raises RequestError for what is none, or has no tower in the model."""
    try:
        found = [decode_media(index, coded) for index, coded in enumerate(wanted.media)]
    except BadRequestError as error:
        raise RequestError(str(error)) from None
    media = []
    for index, data in enumerate(found):
        kind = kind_of(data)
        if not kind:
            raise RequestError(f"media[{index}]: not a PNG/JPEG/GIF/WebP or wav/ogg blob")
        if kind not in sizes.towers:
            raise RequestError(_TOWERS[kind])
        media.append(Media(data=data, id=index, kind=kind))
    return media


def _joined(
    vision: Vision, before: Sequence[int], media: Sequence[Media], after: Sequence[int]
) -> Generator[ShownPrompt, None, ShownPrompt]:
    """Returns ids with media between them. Yields those that have to be decoded first."""
    try:
        return vision.join(before, media, after, lambda: False)
    except UnmeasuredError as error:
        yield error.prompt
    return vision.join(before, media, after, lambda: False)


def _tokens(text: str, tokenizer: Tokenizer, most: int) -> Generator[None, None, list[int]]:
    """Returns the tokens of a text, with those that begin and end one, whatever prompts get. Yields None after a part
    of a long text. Raises RequestError once there are too many."""
    first = [tokenizer.bos] if tokenizer.bos is not None else []
    last = [tokenizer.end] if tokenizer.end is not None else []
    tokens = yield from tokenizer.encode_within(text, most)
    _refuse_long(len(tokens), most)
    return [*first, *tokens, *last]


def _refuse_long(count: int, most: int) -> None:
    if count > most:
        text = f"the input length ({count} tokens) exceeds the context length ({most})"
        raise RequestError(text, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
