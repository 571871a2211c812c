"""`--context`: the length reported to hosts and enforced for requests."""

import pytest

from scripts.tools.host.lib import Client, Process, Request, StatusError
from tests.process.conftest import SpawnModel


async def assert_context(process: Process, tokens: int) -> None:
    """Checks that the status reports this length, a prompt that fills it is refused, and one a token shorter gets one
    token."""
    async with Client.of(process) as client:
        assert (await client.status()).context_length == tokens
        with pytest.raises(StatusError, match=rf"\({tokens} tokens\) exceeds .* context length \({tokens} tokens\)"):
            await client.complete(Request("p" * tokens))
        completion = await client.complete(Request("0" * (tokens - 1)))
        assert completion.text == "1"


async def test_a_shorter_context_is_reported_and_enforced(start: SpawnModel) -> None:
    process = start(arguments=["--context", "100"])
    assert "level=WARN" not in process.output.text
    await assert_context(process, 100)
    await assert_context(start(environment={"MLX_RUNNER_CONTEXT": "50"}), 50)
