"""Cases 12.61-70 and 12.84: embeddings of texts, and an architecture that hosts since 0.40 may ask for."""

import asyncio
import base64
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from scripts.tools.conformance.assertions import answered, expect, refused
from scripts.tools.conformance.cases import Section, argv
from scripts.tools.conformance.models import COHERE, EMBEDDING, EMBEDDING_MEDIA
from scripts.tools.conformance.new_store import HAS
from scripts.tools.conformance.runners import Target
from scripts.tools.host.lib import Reply, Request
from scripts.tools.models.png import png
from scripts.tools.models.wav import noise, wav

EMBEDDINGS = Section("Embeddings since October 2026")
SIZES = [128, 256, 512, 768]
MOST_TOKENS = 8192
PATH = "/v1/embeddings"
NEAR = 0.9999


class Embedding(NamedTuple):
    """The answer for a text. `tokens` is their number, with the first and last one that the runner adds."""

    numbers: list[float]
    tokens: int


async def ask(target: Target, body: object, model: str = EMBEDDING) -> Reply:
    return await target.post(body, PATH, model)


async def embed(target: Target, text: str, **more: object) -> Embedding:
    return embedding_of(await ask(target, {"content": text, **more}))


def embedding_of(reply: Reply) -> Embedding:
    body = json.loads(answered(reply))
    return Embedding(body["embedding"], body["prompt_eval_count"])


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


@EMBEDDINGS.case("12.61", "none", argv, HAS)
async def a_chat_model_embeds_nothing(target: Target) -> None:
    """`/v1/embeddings` of a model without embeddings is 501, whatever the body."""
    for body in (b'{"content":"Hi"}', b"", b"{"):
        reply = await target.post(body, PATH)
        text = "this model does not support embeddings"
        expect("status and text", (reply.status, reply.text.strip()), (501, text))


@EMBEDDINGS.case("12.62", "sizes", argv, HAS)
async def an_embedding_has_length_1(target: Target) -> None:
    """An embedding has 768 numbers and length 1, its count two tokens more than the text, and the status its sizes."""
    client = await target.client(EMBEDDING)
    status = json.loads((await client.send("GET", "/v1/status")).body)
    expect("EmbeddingDimensions", status["EmbeddingDimensions"], SIZES)
    expect("context", status["ContextLength"], MOST_TOKENS)
    for text in ("Why is the sky blue?", "x", "\u00e4\U0001f600 " * 40):
        found = await embed(target, text)
        expect("numbers", len(found.numbers), SIZES[-1])
        assert abs(math.hypot(*found.numbers) - 1) < 1e-5, f"its length is {math.hypot(*found.numbers)}"
        expect("count", found.tokens, len(await client.tokenize(text)) + 2)


@EMBEDDINGS.case("12.63", "together", argv, HAS)
async def texts_at_once_are_as_each_alone(target: Target) -> None:
    """Texts of one to 2,000 tokens that come at once get the embeddings that they get alone."""
    texts = [f"{'word ' * count}{count}" for count in (0, 1, 2, 3, 5, 8, 40, 40, 200, 900)]
    alone = [await embed(target, text) for text in texts]
    together = await asyncio.gather(*(embed(target, text) for text in texts))
    for one, other in zip(alone, together, strict=True):
        expect("count", other.tokens, one.tokens)
        found = cosine(one.numbers, other.numbers)
        assert found > NEAR, f"a text of {one.tokens} tokens has a cosine of {found} with itself"
    assert cosine(alone[0].numbers, alone[3].numbers) < NEAR, "other texts have the same embedding"


@EMBEDDINGS.case("12.64", "empty", argv, HAS)
async def no_text_is_refused(target: Target) -> None:
    """An empty text is 400, and so is a body that is not JSON or has a wrong type."""
    for body in ({"content": ""}, {}, {"content": "", "media": []}):
        refused(await ask(target, body), "empty content")
    for raw in (b"{", b"", b'{"content":1}', b'{"content":"a","dimensions":"x"}'):
        refused(await ask(target, raw), "Bad Request")


@EMBEDDINGS.case("12.65", "dimensions", argv, HAS)
async def sizes_are_checked(target: Target) -> None:
    """`dimensions` must be a size of the model below the full one; the embedding has that size, or the full one."""
    for size in (100, 1000, 767):
        text = f"dimensions {size} not supported; valid values are [128 256 512 768]"
        refused(await ask(target, {"content": "a", "dimensions": size}), text)
    text = "dimensions 768 exceeds the model's embedding dimension 768"
    refused(await ask(target, {"content": "a", "dimensions": 768}), text)
    whole = await embed(target, "a", dimensions=0)
    for size in (256, -1):
        found = await embed(target, "a", dimensions=size)
        assert len(found.numbers) in (size, SIZES[-1]), f"{len(found.numbers)} numbers"
        assert cosine(found.numbers, whole.numbers[: len(found.numbers)]) > NEAR


@EMBEDDINGS.case("12.66", "too-long", argv, HAS)
async def a_text_beyond_the_context_is_413(target: Target) -> None:
    """A text of more tokens than the context holds is 413, and one of exactly as many is embedded."""
    client = await target.client(EMBEDDING)
    text = "z" * (MOST_TOKENS - 2)
    expect("tokens", len(await client.tokenize(text)), MOST_TOKENS - 2)
    expect("count", (await embed(target, text)).tokens, MOST_TOKENS)
    for longer in (f"{text}z", text * 50):
        reply = await ask(target, {"content": longer})
        expect("status", reply.status, 413)
        assert reply.text.startswith("the input length ("), reply.text


@EMBEDDINGS.case("12.67", "media", argv, HAS)
async def media_are_checked(target: Target) -> None:
    """Media that are not base64, neither picture nor sound, or without a tower in the model, are 400."""
    picture, sound, neither = (
        base64.b64encode(data).decode() for data in (png(8, 8, (9, 9, 9)), b"RIFF\0\0\0\0WAVEfmt ", b"a text")
    )
    wanted = {
        "A*==": "media[1]: illegal base64 data at input byte 1",
        neither: "media[1]: not a PNG/JPEG/GIF/WebP or wav/ogg blob",
    }
    for coded, text in wanted.items():
        reply = await ask(target, {"content": "a", "media": [picture, coded]})
        # Towers may be looked for before the second medium is.
        if coded != neither or "vision tower" not in reply.text:
            refused(reply, text)
    refused(
        await ask(target, {"content": "a", "media": [picture]}), "model has no vision tower but media contains an image"
    )
    refused(await ask(target, {"media": [sound]}), "model has no audio tower but media contains audio")


@EMBEDDINGS.case("12.68", "media-embedded", argv, HAS)
async def media_are_embedded_behind_their_text(target: Target) -> None:
    """Pictures and sounds are embedded after the text: their tokens are counted, and order and content matter."""

    async def found(content: str, *media: bytes) -> Embedding:
        body = {"content": content, "media": [base64.b64encode(each).decode() for each in media]}
        return embedding_of(await ask(target, body, EMBEDDING_MEDIA))

    red, blue, tone = png(96, 96, (200, 9, 9)), png(96, 96, (9, 9, 200)), wav(noise(9000))
    text = await found("a")
    picture, sound = await found("a", red), await found("a", tone)
    frames = (9000 + 160 - 321) // 160 + 1
    expect("tokens of a sound", sound.tokens - text.tokens, -(-frames // 4) + 2)
    assert picture.tokens - text.tokens > 66, f"a picture counts as {picture.tokens - text.tokens} tokens"
    both, turned, other = await found("a", red, tone), await found("a", tone, red), await found("a", blue, tone)
    for each in (both, turned, other):
        expect("tokens of both", each.tokens, picture.tokens + sound.tokens - text.tokens)
        assert abs(math.hypot(*each.numbers) - 1) < 1e-5, f"its length is {math.hypot(*each.numbers)}"
    for name, one, two in (("order", both, turned), ("content", both, other), ("media", text, picture)):
        assert cosine(one.numbers, two.numbers) < 1 - 1e-7, f"{name} does not matter"
    again = await asyncio.gather(found("a", red, tone), found("", tone), found("a"))
    assert cosine(again[0].numbers, both.numbers) > NEAR, "beside others it is another embedding"
    expect("tokens without a text", again[1].tokens, sound.tokens - 1)


@EMBEDDINGS.case("12.69", "crowd", argv, HAS)
async def a_crowd_is_served(target: Target) -> None:
    """Sixteen texts at once, beside a long one whose client leaves, are all embedded."""
    leaving = asyncio.create_task(embed(target, "long " * 1500))
    await asyncio.sleep(0)
    found = await asyncio.gather(*(embed(target, f"text {number}") for number in range(16)))
    leaving.cancel()
    await asyncio.wait({leaving})
    assert len({tuple(each.numbers) for each in found}) == len(found)
    await embed(target, "after")


@EMBEDDINGS.case("12.70", "ends", argv, HAS)
async def ends_are_added_whatever_prompts_get(target: Target) -> None:
    """A text gets BOS and EOS, though prompts get no BOS."""
    client = await target.client(EMBEDDING)
    expect("tokens", len(await client.tokenize("a")), 1)
    expect("count", (await embed(target, "a")).tokens, 3)


@EMBEDDINGS.case("12.84", "cohere2-moe", argv, HAS)
async def a_cohere2_moe_answers(target: Target) -> None:
    """A Cohere2-MoE answers a prompt beyond its window, and the same from its cache."""
    request = Request("a prompt that is longer than the window of its layers " * 3, {"num_predict": 12})
    first = await target.complete(request, COHERE)
    again = await target.complete(request, COHERE)
    expect("answer", again.text, first.text)
    cached, count = again.final.prompt_eval_cached_count, again.final.prompt_eval_count
    assert count > (cached or 0) >= count - 40, f"{cached} of {count} tokens are cached"
