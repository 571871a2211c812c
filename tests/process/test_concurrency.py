"""Concurrent requests and clients that disconnect, beyond the conformance cases 75-80."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from scripts.tools.conformance.assertions import ALPHABET, generating, gone, quiet
from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import Client, Process, Request
from tests.process.conftest import SpawnModel


def long_prompt(first: str) -> str:
    """Returns a prompt whose prefill takes seconds in small chunks. Other first letters share no prefix with it."""
    return first + "q" * (CONTEXT - 100)


async def test_twenty_concurrent_requests_get_their_own_answers(client: Client) -> None:
    prompts = [f"{number:02d} {letter}" for number, letter in enumerate("abcdefghijklmnopqrst")]
    completions = await asyncio.gather(*(client.complete(Request(prompt, {"num_predict": 4})) for prompt in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        start = ord(prompt[-1]) + 1
        assert completion.text == "".join(map(chr, range(start, start + 4)))


@pytest.mark.parametrize("places", [1, 2])
async def test_headers_are_withheld_until_the_request_starts(places: int, start: SpawnModel) -> None:
    process = start(environment={"OLLAMA_NUM_PARALLEL": str(places)})
    async with Client.of(process) as client, AsyncExitStack() as running:
        for _ in range(places):
            await running.enter_async_context(generating(client))
        queued = asyncio.create_task(client.post_completion(Request("Hi")))
        await asyncio.sleep(0.3)
        assert not queued.done()
        await running.aclose()
        response = await asyncio.wait_for(queued, 30)
        assert response.status == 200
        assert (await response.read()).count(b"\n") == len(ALPHABET) + 1


async def test_clients_that_disconnect_during_decode_cause_no_errors(client: Client, shared: Process) -> None:
    """A write to a connection that has just been closed is not an error; one line below ERROR reports it."""
    before = len(shared.output.lines)
    for number in range(60):
        assert (await client.complete(Request("leaving 0"), cancel_after=1 + number % 5)).cancelled
    assert (await client.complete(Request("w"))).text == "xyz"
    quiet(shared)
    assert [line for line in shared.output.lines[before:] if "level=ERROR" in line] == []


async def test_a_retry_reuses_the_cancelled_prefill(client: Client) -> None:
    """A host that timed out tries again; the second prefill starts where the first one stopped."""
    prefill = asyncio.create_task(client.complete(Request(long_prompt("C"), {"num_predict": 1})))
    await asyncio.sleep(0.4)
    await gone(prefill)
    await asyncio.sleep(0.1)
    body = await client.complete(Request(long_prompt("C"), {"num_predict": 1}))
    cached = json.loads(body.lines[-1])["PromptEvalCachedCount"]
    assert 0 < cached < CONTEXT - 100
