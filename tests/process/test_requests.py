"""Forms of a completion request beyond the conformance cases 21-35, and the exact form of a refusal."""

import asyncio
import json
import time

import pytest

from scripts.tools.conformance.assertions import ALPHABET, text_of
from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import Client, Reply, Request
from tests.lib.patience import stretched


async def post(client: Client, body: object) -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await client.send("POST", "/completion", raw, {"Content-Type": "application/json"})


def assert_refused(reply: Reply, text: str) -> None:
    assert (reply.status, reply.text) == (400, text + "\n")
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "options",
    [
        *(b'{"top_k":1.0}', b'{"temperature":"0.5"}', b'{"stop":[1]}', b'{"num_predict":true}', b'{"num_predict":1e3}'),
        b'{"seed":99999999999999999999}',
    ],
)
async def test_wrong_types_in_options_are_a_bad_request(options: bytes, client: Client) -> None:
    assert_refused(await post(client, b'{"Prompt":"a","Options":' + options + b"}"), "Bad Request")


async def test_media_that_are_no_array_are_a_bad_request(client: Client) -> None:
    assert_refused(await post(client, b'{"Prompt":"a","Media":{}}'), "Bad Request")


async def test_an_answer_is_chunked_and_not_compressed(client: Client) -> None:
    reply = await post(client, {"Prompt": "Hi"})
    assert text_of(reply) == ALPHABET
    assert reply.headers["transfer-encoding"] == "chunked"
    assert "content-encoding" not in reply.headers


async def test_null_is_an_empty_prompt(client: Client) -> None:
    for body in (b"null", b"{}", b'{"Prompt":null}'):
        assert_refused(await post(client, body), "empty prompt")


async def test_invalid_unicode_becomes_replacement_characters(client: Client) -> None:
    """Go decodes half a surrogate pair, or a byte that is not UTF-8, as one U+FFFD: three bytes here."""
    for broken in (b'{"Prompt":"\\ud83dx"}', b'{"Prompt":"\xffx"}'):
        reply = await post(client, broken)
        assert text_of(reply) == "yz"
        assert json.loads(reply.body.splitlines()[-1])["PromptEvalCount"] == 4


async def test_bos_is_not_de_duplicated(small_client: Client) -> None:
    final = (await small_client.complete(Request("<|begin|>x"))).final
    assert final.prompt_eval_count == 3


async def test_media_are_refused_before_the_prompt_is_looked_at(client: Client) -> None:
    medium = {"data": "", "id": 0, "Kind": "image"}
    reply = await post(client, {"Prompt": "", "Media": [medium]})
    assert_refused(reply, "this model does not support image input")


async def test_a_body_of_64_mebibytes_is_accepted(client: Client) -> None:
    padding = b"x" * (64 << 20)
    body = b'{"Padding":"' + padding + b'","Prompt":"Hi"}'
    assert text_of(await post(client, body)) == ALPHABET


async def test_a_prompt_of_half_a_megabyte_is_counted_while_status_stays_quick(client: Client) -> None:
    length = 500_000
    refused = asyncio.create_task(post(client, {"Prompt": "x" * length}))
    slowest = 0.0
    while not refused.done():
        started = time.monotonic()
        await client.status()
        slowest = max(slowest, time.monotonic() - started)
        await asyncio.sleep(0.01)
    assert_refused(
        await refused,
        f"input length ({length} tokens) exceeds the model's maximum context length ({CONTEXT} tokens)",
    )
    assert slowest < stretched(1.0)
