"""Concurrent requests as a host sees them: each gets its own answer, and none is delayed by another's failure or
disconnect."""

import asyncio
import json

from scripts.tools.conformance.assertions import expect, quiet, refused
from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import OUT_OF_MEMORY, Client, Completion, Process, Request
from tests.process.conftest import SpawnModel

DIGITS = "1234567890" * 60
WAIT_S = 60.0
TEXTS = {"0": DIGITS[:300], "5": DIGITS[5:205], "one more 9": DIGITS[9:120], "a": "bcdefghijk"}
"""Prompts and their answers."""


def ask(client: Client, prompt: str) -> asyncio.Task[Completion]:
    """Requests as many tokens as the prompt's answer has."""
    return asyncio.create_task(client.complete(Request(prompt, {"num_predict": len(TEXTS[prompt])})))


async def test_disconnects_during_decode_do_not_affect_others(client: Client, shared: Process) -> None:
    """A write to a connection that has just been closed is not an error; one line below ERROR reports it."""
    before = len(shared.output.lines)
    staying = ask(client, "0")
    for number in range(20):
        assert (await client.complete(Request("leaving 0"), cancel_after=1 + number % 5)).cancelled
    expect("text", (await asyncio.wait_for(staying, WAIT_S)).text, TEXTS["0"])
    expect("the next one", (await client.complete(Request("w"))).text, "xyz")
    quiet(shared)
    lines = shared.output.lines[before:]
    assert not [line for line in lines if "level=ERROR" in line or "level=WARN" in line]


async def test_only_a_request_that_can_never_fit_is_refused(start: SpawnModel) -> None:
    """One that is too long is refused with a 400 when it would start, and be it the very first one: the warm-up has
    shown what a token takes."""
    process = start(arguments=["--memory", "4MiB"])
    body = json.dumps({"Prompt": "q" * (CONTEXT - 100)}).encode()

    async def is_refused(client: Client) -> None:
        reply = await asyncio.wait_for(client.send("POST", "/completion", body), WAIT_S)
        refused(reply, reply.text.strip())
        assert f"the keys and values of {CONTEXT - 100} tokens take about " in reply.text
        assert "the budget is 4.2 MB" in reply.text
        assert not any(phrase in reply.text.lower() for phrase in OUT_OF_MEMORY), "hosts would unload other models"

    async with Client.of(process) as client:
        await is_refused(client)
        assert (await client.complete(Request("w"))).text == "xyz"
        answer = ask(client, "5")  # its layers never grow beyond their first 256 tokens, which just fit
        await is_refused(client)
        expect("text", (await asyncio.wait_for(answer, WAIT_S)).text, TEXTS["5"])
    quiet(process)
