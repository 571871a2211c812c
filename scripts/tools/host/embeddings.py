"""Embeddings as hosts since 0.40 ask a runner for them: `/api/embed`, the old `/api/embeddings`, and OpenAI's route.

Every input becomes a request of its own to the runner's `/v1/embeddings`, all of them at once. The host cuts inputs to
the context, and vectors to the `dimensions` that are wanted (docs/internals/wire.md, 12).
"""

import asyncio
import base64
import json
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from aiohttp import web

from scripts.tools.host.go_json import Body, RefusedError, flag_of, json_response, keep_alive_of, read_body, text_of
from scripts.tools.host.lib import Client, Loaded, StatusError
from scripts.tools.host.shelf import Shelf

_ENDS = 2
"""Tokens that the runner puts around a text."""
_SHORT_TOKENS = 512
"""The length of an input after the runner has found it too long."""


class Embedded(NamedTuple):
    """The answer for one input."""

    numbers: Sequence[float]
    tokens: int


class Embeddings:
    """The routes. Any model is asked; one that makes no embeddings says so."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/embed", self._embed),
            web.post("/api/embeddings", self._embed_one),
            web.post("/v1/embeddings", self._embed_as_openai),
        ]

    async def _embed(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        found = await self._embedded(body, inputs_of(body.get("input")))
        count = sum(each.tokens for each in found)
        numbers = [each.numbers for each in found]
        return json_response({"model": text_of(body, "model"), "embeddings": numbers, "prompt_eval_count": count})

    async def _embed_one(self, request: web.Request) -> web.Response:
        """Every error of a runner is a 500 here."""
        body = await read_body(request)
        try:
            found = await self._embedded(body, inputs_of(body.get("prompt")))
        except StatusError as error:
            raise RefusedError(500, str(error)) from error
        return json_response({"embedding": found[0].numbers if found else []})

    async def _embed_as_openai(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        wanted = body.get("encoding_format", "float")
        if wanted not in ("float", "base64"):
            raise RefusedError(400, f"Invalid value for 'encoding_format' = {wanted}. Supported values: float, base64")
        found = await self._embedded(body, inputs_of(body.get("input")))
        count = sum(each.tokens for each in found)
        data = [
            {
                "object": "embedding",
                "embedding": _coded(each.numbers) if wanted == "base64" else each.numbers,
                "index": at,
            }
            for at, each in enumerate(found)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_response({"object": "list", "data": data, "model": text_of(body, "model"), "usage": usage})

    async def _embedded(self, body: Body, texts: Sequence[str]) -> list[Embedded]:
        """Returns the embeddings of the texts, cut to the `dimensions` of the body. Raises what refuses them."""
        model = self._shelf.find(text_of(body, "model"))
        given = body.get("dimensions")
        dimensions = given if isinstance(given, int) else 0
        async with self._shelf.runner(model, body, keep_alive_of(body)) as loaded:
            sizes = json.loads((await loaded.client.send("GET", "/v1/status")).body).get("EmbeddingDimensions")
            if dimensions > 0 and sizes and dimensions not in sizes:
                listed = " ".join(map(str, sizes))
                text = f"dimensions {dimensions} not supported by this model; valid values are [{listed}]"
                raise RefusedError(400, text)
            truncates = flag_of(body, "truncate", True)
            found = await asyncio.gather(*(_ask(loaded, text, truncates=truncates) for text in texts))
        for each in found if dimensions > 0 else ():
            if dimensions > len(each.numbers):
                raise RefusedError(400, f"dimensions {dimensions} exceeds embedding length {len(each.numbers)}")
        return [each._replace(numbers=shortened(each.numbers, dimensions)) for each in found]


def inputs_of(given: object) -> list[str]:
    """Returns the texts of a request: one, a list of them, or of objects that have one. Raises `RefusedError`."""
    texts = []
    for each in given if isinstance(given, list) else [given]:
        text = each.get("text") if isinstance(each, dict) else each
        if not isinstance(text, str):
            raise RefusedError(400, "invalid input type")
        texts.append(text)
    return texts


def shortened(numbers: Sequence[float], dimensions: int) -> Sequence[float]:
    """Returns the first numbers of a vector, of length 1 again; all of them for 0."""
    if dimensions <= 0:
        return numbers
    length = math.hypot(*numbers[:dimensions]) or 1.0
    return [each / length for each in numbers[:dimensions]]


def _coded(numbers: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


async def _ask(loaded: Loaded, text: str, *, truncates: bool) -> Embedded:
    """Asks the runner for one embedding; a text that is too long is cut, if it may be."""
    client = loaded.client
    ids = await client.tokenize(text)
    most = loaded.context_length - _ENDS
    if len(ids) > most > 0:
        if not truncates:
            raise RefusedError(400, "the input length exceeds the context length")
        text = await _text(client, ids[:most])
    try:
        return await _embedding(client, text)
    except StatusError as error:
        if error.status != 413 or not truncates or len(ids) <= _SHORT_TOKENS:
            raise
    return await _embedding(client, await _text(client, ids[:_SHORT_TOKENS]))


async def _text(client: Client, ids: Sequence[int]) -> str:
    reply = await client.send("POST", "/v1/detokenize", json.dumps(list(ids)).encode())
    return str(json.loads(reply.body))


async def _embedding(client: Client, text: str) -> Embedded:
    body = await client.ask("/v1/embeddings", {"content": text})
    return Embedded(body["embedding"], body["prompt_eval_count"])  # type: ignore[arg-type]  # as the runner says
