"""`POST /v1/embeddings`: the embedding of one text with its media, in one JSON object.

The checks have the same order as in Ollama's runner (docs/internals/wire.md, 12).
"""

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from math import hypot

from protocol import BadRequestError, Media
from protocol.embeddings import EmbeddingsRequest, decode_embeddings, decode_media, embedding_body, sniffed_kind
from runner.embeddings.embedder import EmbeddingSizes, TextEmbedder, TextToEmbed
from runner.engine.ports import CheckedBody, EncoderUse, Steps, Vision, WingEndpoint
from runner.engine.request import Limits
from runner.errors import RequestError
from runner.tokenizer import Tokenizer

MOST_BODY_BYTES = 32 << 20
_TOWERS = {
    "image": "model has no vision tower but media contains an image",
    "audio": "model has no audio tower but media contains audio",
}


@dataclass(frozen=True)
class EmbeddingsEndpoint:
    """The endpoint `/v1/embeddings`. Sends a text to the engine's embedder, and answers with the embedding."""

    embedder: TextEmbedder
    tokenizer: Tokenizer
    vision: Vision
    limits: Limits
    post: Callable[[Callable[[], None]], None]
    """Makes the engine thread call a function."""

    @property
    def use(self) -> EncoderUse:
        endpoints = {"/v1/embeddings": WingEndpoint(MOST_BODY_BYTES, self.check)}
        return EncoderUse("embeddings, by POST /v1/embeddings", endpoints, self.embedder.sizes.listed)

    def check(self, body: Sequence[bytes]) -> Steps[CheckedBody]:
        """Checks a body and tokenizes the text in it. Raises RequestError in the words that hosts know."""
        tokenizer, limits, sizes = self.tokenizer, self.limits, self.embedder.sizes
        wanted = decode_embeddings(b"".join(body))
        if not wanted.content and not wanted.media:
            raise RequestError("empty content")
        dimensions = _dimensions(wanted.dimensions, sizes)
        media = _media(wanted, sizes)
        tokens = yield from _tokens(wanted.content, tokenizer, limits.context_length)
        shown = None
        if media:
            last = len(tokens) - (tokenizer.end is not None)
            shown = yield from self.vision.join(tokens[:last], media, tokens[last:], lambda: False)
            tokens = shown.ids
        if not tokens:
            raise RequestError("empty token sequence")
        _refuse_long(len(tokens), limits.context_length)
        most = max(tokens if shown is None else shown.keys)
        if most >= limits.vocab_size > 0:
            raise RequestError(f"the model has no token {most}: its vocabulary has {limits.vocab_size}")
        if text := self.embedder.refusal(len(tokens)):
            raise RequestError(text, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        answer = partial(self._answer, TextToEmbed(tokens, shown), dimensions)
        return CheckedBody(answer, shown.nbytes if shown is not None else 0, shown)

    async def _answer(self, text: TextToEmbed, dimensions: int) -> bytes:
        self.post(partial(self.embedder.add_text, text))
        embedding = await asyncio.wrap_future(text.found)
        return embedding_body(shortened(embedding, dimensions), len(text.tokens))


def shortened(embedding: Sequence[float], dimensions: int) -> Sequence[float]:
    """Returns the first `dimensions` numbers of an embedding, scaled to length 1; all numbers if `dimensions` is 0."""
    if not dimensions:
        return embedding
    kept = embedding[:dimensions]
    length = max(hypot(*kept), 1e-12)
    return [each / length for each in kept]


def _dimensions(wanted: int, sizes: EmbeddingSizes) -> int:
    """Returns the size to which the embedding is to be cut, or 0 for the full size. Raises RequestError."""
    if wanted <= 0:
        return 0
    if sizes.listed and wanted not in sizes.listed:
        listed = " ".join(map(str, sizes.listed))
        raise RequestError(f"dimensions {wanted} not supported; valid values are [{listed}]")
    if wanted >= sizes.full:
        raise RequestError(f"dimensions {wanted} exceeds the model's embedding dimension {sizes.full}")
    return wanted


def _media(wanted: EmbeddingsRequest, sizes: EmbeddingSizes) -> list[Media]:
    """Returns the media, with ids from 0. Raises RequestError for an unknown format, or a kind without a tower."""
    try:
        found = [decode_media(index, coded) for index, coded in enumerate(wanted.media)]
    except BadRequestError as error:
        raise RequestError(str(error)) from None
    media = []
    for index, data in enumerate(found):
        kind = sniffed_kind(data)
        if not kind:
            raise RequestError(f"media[{index}]: not a PNG/JPEG/GIF/WebP or wav/ogg blob")
        if kind not in sizes.towers:
            raise RequestError(_TOWERS[kind])
        media.append(Media(data=data, id=index, kind=kind))
    return media


def _tokens(text: str, tokenizer: Tokenizer, most: int) -> Generator[None, None, list[int]]:
    """Returns the tokens of a text between the tokens that begin and end a text, even for a model whose prompts lack
    those. Yields after each part of a long text. Raises RequestError for more than `most` tokens."""
    first = [tokenizer.bos] if tokenizer.bos is not None else []
    last = [tokenizer.end] if tokenizer.end is not None else []
    tokens = yield from tokenizer.encode_within(text, most)
    _refuse_long(len(tokens), most)
    return [*first, *tokens, *last]


def _refuse_long(count: int, most: int) -> None:
    if count > most:
        text = f"the input length ({count} tokens) exceeds the context length ({most})"
        raise RequestError(text, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
