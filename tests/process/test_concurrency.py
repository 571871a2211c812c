"""A request that can never fit, as a host sees it; clients that leave are in tests/process/hostile."""

import asyncio
import json

from scripts.tools.conformance.assertions import expect, quiet, refused
from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import OUT_OF_MEMORY, Client, Request
from tests.process.conftest import SpawnModel

WAIT_S = 60.0


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
        # the layers of this one never grow beyond their first 256 tokens, which just fit
        answer = asyncio.create_task(client.complete(Request("5", {"num_predict": 200})))
        await is_refused(client)
        expect("text", (await asyncio.wait_for(answer, WAIT_S)).text, "6789012345" * 20)
    quiet(process)
