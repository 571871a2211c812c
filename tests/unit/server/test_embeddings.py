"""`POST /v1/embeddings` over an engine without a model: what is checked, what is computed, what is answered."""

import asyncio
import base64
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import pytest

from protocol import BadRequestError
from protocol.embeddings import decode_media, sniffed_kind
from runner.embeddings.embedder import EmbeddingSizes, TextEmbedder, TextToEmbed
from runner.embeddings.endpoint import EmbeddingsEndpoint
from runner.errors import RequestError
from runner.media.families import Gemma4, Gemma4Sound
from runner.media.prompt import MediaNames, MediaPrompt, Picture, Sound
from runner.media.row_store import FamilyPictures, RowStore
from runner.media.support import Hearing, MediaSupport
from scripts.tools.models.png import png
from scripts.tools.models.wav import noise, wav
from tests.unit.media.pictures import Here
from tests.unit.server.script import CONTEXT, Client, Script

WAV = b"RIFF\x00\x00\x00\x00WAVEfmt "


class Embedder:
    """Stands in for the engine's: keeps the texts, whose futures the test sets."""

    def __init__(
        self, towers: Collection[str] = (), listed: tuple[int, ...] = (2, 3), most_tokens: int = 2 * CONTEXT
    ) -> None:
        self.sizes = EmbeddingSizes(4, listed, frozenset(towers), token_bytes=1, least_bytes=0)
        self.texts: list[TextToEmbed] = []
        self.most_tokens = most_tokens

    def refusal(self, tokens: int) -> str:
        return "too large for the memory" if tokens > self.most_tokens else ""

    def add_text(self, text: TextToEmbed) -> None:
        self.texts.append(text)

    async def next(self) -> TextToEmbed:
        async with asyncio.timeout(5):
            while not self.texts:
                await asyncio.sleep(0.001)
        return self.texts.pop(0)


def embeds(engine: Script, embedder: Embedder) -> Embedder:
    """Makes the engine one of a model that makes embeddings."""
    own = cast("TextEmbedder", embedder)
    endpoint = EmbeddingsEndpoint(own, engine.tokenizer, engine.vision, engine.limits, lambda call: call())
    engine.encoder_use = endpoint.use
    return embedder


@pytest.fixture
def embedder(engine: Script) -> Embedder:
    return embeds(engine, Embedder())


async def asked(client: Client, body: object) -> tuple[int, str]:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client.post("/v1/embeddings", data=sent)
    return response.status, await response.text()


@pytest.mark.parametrize("body", [b"", b"{", {"content": "a"}])
async def test_a_model_that_answers_makes_no_embeddings(body: object, client: Client) -> None:
    assert await asked(client, body) == (501, "this model does not support embeddings\n")


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/score"])
async def test_a_model_that_makes_embeddings_does_not_answer(
    path: str, client: Client, engine: Script, embedder: Embedder
) -> None:
    response = await client.post(path, json={"Prompt": "a", "rows": []})
    text = "this model makes embeddings, by POST /v1/embeddings, not text\n"
    assert (response.status, await response.text()) == (501, text)
    assert not engine.submitted
    assert not embedder.texts


async def test_the_status_has_its_sizes(client: Client, engine: Script, embedder: Embedder) -> None:
    assert (await (await client.get("/v1/status")).json())["EmbeddingDimensions"] == [2, 3]
    embeds(engine, Embedder(listed=()))
    assert (await (await client.get("/v1/status")).json())["EmbeddingDimensions"] is None
    del embedder


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


PNG = coded(png(4, 4, (1, 2, 3)))
REFUSALS: Mapping[str, tuple[object, int, str]] = {
    "no JSON": (b"{", 400, "Bad Request: invalid JSON at byte 1: expecting a key in double quotes, found the end"),
    "nothing": (b"", 400, "Bad Request: the body is empty\n"),
    "a number for a text": ({"content": 1}, 400, "Bad Request: content must be a string, found 1\n"),
    "a text for a number": (
        {"content": "a", "dimensions": "2"},
        400,
        'Bad Request: dimensions must be an integer, found "2"\n',
    ),
    "no content": ({}, 400, "empty content"),
    "an empty text": ({"content": "", "media": []}, 400, "empty content"),
    "another size": ({"content": "a", "dimensions": 1}, 400, "dimensions 1 not supported; valid values are [2 3]"),
    "no base64": ({"content": "a", "media": [PNG, "AB*D"]}, 400, "media[1]: illegal base64 data at input byte 2"),
    "neither": ({"media": [coded(b"text")]}, 400, "media[0]: not a PNG/JPEG/GIF/WebP or wav/ogg blob"),
    "a picture": ({"content": "a", "media": [PNG]}, 400, "model has no vision tower but media contains an image"),
    "a sound": ({"media": [coded(WAV)]}, 400, "model has no audio tower but media contains audio"),
    "too long": (
        {"content": "x" * (CONTEXT - 1)},
        413,
        f"the input length ({CONTEXT + 1} tokens) exceeds the context length ({CONTEXT})",
    ),
    "far too long": ({"content": "x" * 700_000}, 413, "the input length (262144 tokens) exceeds the context length"),
    "a token that the model lacks": ({"content": "\u4e00"}, 400, "the model has no token"),
    "its full size": (
        {"content": "a", "dimensions": 4},
        400,
        "dimensions 4 exceeds the model's embedding dimension 4\n",
    ),
    "no media read": ({"content": "a", "media": [PNG]}, 501, "media embedding not supported on this model\n"),
    "no memory": ({"content": "abcd"}, 413, "too large for the memory\n"),
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "its full size": {"listed": ()},
    "no media read": {"towers": {"image"}},
    "no memory": {"most_tokens": 3},
}
"""The models that refuse these."""


@pytest.mark.parametrize("what", REFUSALS)
async def test_everything_is_checked_before_anything_is_computed(what: str, client: Client, engine: Script) -> None:
    with_ends(engine)
    embedder = embeds(engine, Embedder(**MODELS.get(what, {})))
    body, status, text = REFUSALS[what]
    found, said = await asked(client, body)
    assert (found, said[: len(text)]) == (status, text)
    assert not embedder.texts


def with_ends(engine: Script) -> None:
    engine.tokenizer.bos, engine.tokenizer.end = 1, 2
    engine.tokenizer.add_bos = False


@pytest.fixture
def sees(engine: Script, support: MediaSupport) -> Embedder:
    """Of a model that embeds pictures and sounds."""
    engine.vision = support
    return embeds(engine, Embedder({"image", "audio"}))


@pytest.fixture
def support(engine: Script) -> Iterator[MediaSupport]:
    with_ends(engine)
    pictures = FamilyPictures(Gemma4(budget=70), 60, 62, 61)
    hearing = Hearing(Gemma4Sound(), 57, 58, 59)
    support = MediaSupport(pictures, MediaNames(), RowStore(pictures, decoder=Here()), hearing)
    yield support
    support.store.close()


@pytest.mark.parametrize("content", ["ab", ""])
async def test_media_stand_behind_the_text_in_their_order(
    client: Client, sees: Embedder, support: MediaSupport, content: str
) -> None:
    sent = {"content": content, "media": [coded(wav(noise(3000))), coded(png(96, 96, (9, 9, 9)))]}
    posted = asyncio.create_task(asked(client, sent))
    text = await sees.next()
    assert text.tokens == [1, *content.encode(), 57, *[58] * 5, 59, 60, *[62] * 64, 61, 2]
    assert isinstance(text.shown, MediaPrompt)
    assert [type(each.item) for each in text.shown.spans] == [Sound, Picture]
    assert support.store.held_bytes > 0, "decoded before the text is queued"
    text.found.set_result([1.0, 0.0, 0.0, 0.0])
    status, body = await posted
    assert (status, json.loads(body)["prompt_eval_count"]) == (200, len(text.tokens))
    assert support.store.held_bytes == 0, "nobody took them"


@pytest.mark.parametrize(
    ("media", "status", "said"),
    [
        ([wav(noise(100))], 400, "audio too short"),
        ([wav(noise(3000)), WAV], 400, "wav: no fmt chunk"),
        ([png(96, 96, (9, 9, 9))[:40]], 400, "decode image: "),
        ([wav(noise(31 * 16_000))], 413, "the input length (78"),
    ],
)
async def test_media_that_cannot_be_read_or_are_too_long_are_refused(
    client: Client, sees: Embedder, support: MediaSupport, media: list[bytes], status: int, said: str
) -> None:
    found, text = await asked(client, {"content": "a", "media": [coded(each) for each in media]})
    assert (found, text[: len(said)]) == (status, said)
    assert not sees.texts
    assert support.store.held_bytes == 0


@pytest.mark.parametrize("add_bos", [False, True])
async def test_a_text_has_its_ends_and_its_embedding(
    add_bos: bool, client: Client, engine: Script, embedder: Embedder
) -> None:
    with_ends(engine)
    engine.tokenizer.add_bos = add_bos
    full = [0.5, -0.5, 0.5, 0.5]
    for dimensions, wanted in ((None, full), (0, full), (-1, full), (2, [0.5**0.5, -(0.5**0.5)])):
        posted = asyncio.create_task(asked(client, {"content": "ab", "dimensions": dimensions}))
        text = await embedder.next()
        assert text.tokens == [1, 97, 98, 2]
        text.found.set_result(full)
        status, said = await posted
        found = json.loads(said)
        assert found.pop("embedding") == pytest.approx(wanted), "fewer numbers are of length 1 again"
        assert (status, found, said[-2:]) == (200, {"prompt_eval_count": 4}, "}\n")


async def test_a_text_that_fails_is_told_why(client: Client, embedder: Embedder) -> None:
    posted = asyncio.create_task(asked(client, {"content": "ab"}))
    (await embedder.next()).found.set_exception(RequestError("no memory", 500))
    assert await posted == (500, "no memory\n")


async def test_a_client_that_leaves_takes_its_text_along(client: Client, embedder: Embedder) -> None:
    posted = asyncio.create_task(asked(client, {"content": "ab"}))
    text = await embedder.next()
    posted.cancel()
    async with asyncio.timeout(5):
        while not text.found.cancelled():
            await asyncio.sleep(0.001)


def test_media_are_known_by_their_first_bytes() -> None:
    kinds = {
        "image": (b"\x89PNG\r\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF0000WEBPVP8"),
        "audio": (WAV, b"OggS"),
        "": (b"\xff\xd8\xff", b"RIFF0000AVI ", b"RIF", b""),
    }
    assert {kind: {*map(sniffed_kind, files)} for kind, files in kinds.items()} == {kind: {kind} for kind in kinds}


@pytest.mark.parametrize(("coded", "at"), [("A", 1), ("AA=A", 2), ("AAA", 3), ("=", 0), ("AAAA-", 4)])
def test_what_is_no_base64_is_refused_with_its_place(coded: str, at: int) -> None:
    with pytest.raises(BadRequestError, match=rf"^media\[3\]: illegal base64 data at input byte {at}$"):
        decode_media(3, coded)


@pytest.mark.parametrize(("coded", "data"), [("", b""), ("AA==", b"\0"), ("AA\r\nAA", b"\0\0\0")])
def test_base64_may_have_line_ends(coded: str, data: bytes) -> None:
    assert decode_media(0, coded) == data
