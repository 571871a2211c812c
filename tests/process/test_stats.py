"""Statistics of a real process, in its endpoints, in `top` and in its log: the numbers match the requests, and no
prompt text is shown."""

import asyncio

import msgspec
import pytest

from protocol.stats import CachePicture, Stats
from scripts.tools.host.lib import F_SECOND, Client, Request, StatusError
from tests.process.conftest import RANDOM, SpawnModel, command, read_stats

PROMPT = "zebras and okapis met at the well of Souls in the rain, and none of them said a word about it"
OTHER = f"{PROMPT[:40]} but this time they did"
SECRETS = ("zebras", "okapis", "Souls")
TRACE = ("--log-level", "trace")
LOOKS = ("/v1/stats", "/v1/cache", "/metrics")


async def stats(client: Client) -> Stats:
    """Returns fresh statistics; those of a moment ago may be served again."""
    before = None
    while True:
        found = await read_stats(client)
        if before is not None and found.uptime_s != before.uptime_s:
            return found
        before = before or found


async def cache_report(client: Client) -> CachePicture:
    return msgspec.json.decode((await client.send("GET", "/v1/cache")).body, type=CachePicture)


async def test_all_that_shows_numbers_shows_the_same(start: SpawnModel) -> None:
    """With --inspect-text, the cache also shows text; the log never does."""
    process = start(RANDOM, [*TRACE, "--inspect-text", "--parallel", "3"], generation=F_SECOND)
    async with Client.of(process) as client:
        await client.complete(Request(PROMPT, {"num_predict": 5}))
        second = (await client.complete(Request(OTHER, {"num_predict": 7}))).final
        with pytest.raises(StatusError):
            await client.complete(Request(""))
        told = await stats(client)
        assert (told.model, told.path, told.architecture, told.parallel) == (RANDOM, "", "LlamaForCausalLM", 3)
        assert told.tokens.cached == (second.prompt_eval_cached_count or 0) > 20
        assert told.memory.peak_bytes >= told.memory.used_bytes >= told.memory.weights_bytes > 0
        assert PROMPT[:40] in [node.text for node in (await cache_report(client)).nodes]
        scraped = (await client.send("GET", "/metrics")).text
        assert f'mlx_runner_prompt_tokens_total{{source="cache"}} {told.tokens.cached}.0\n' in scraped
        done = await asyncio.to_thread(command, "top", "--port", str(process.port))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == RANDOM
    assert lines[3].startswith("requests    0 of 3 running, 0 waiting, 2 answered, 1 refused")
    assert not [line for line in process.output.lines if any(secret in line for secret in SECRETS)]


async def test_no_prompt_is_shown(start: SpawnModel) -> None:
    """No endpoint shows text of a prompt, and neither does the log at any level."""
    process = start(RANDOM, TRACE, generation=F_SECOND)
    async with Client.of(process) as client:
        for prompt in (PROMPT, OTHER):
            await client.complete(Request(prompt, {"num_predict": 2}))
        for refused in (Request(PROMPT * 500), Request(PROMPT, {}, format={"type": "regex", "pattern": "zebras("})):
            with pytest.raises(StatusError):
                await client.complete(refused)
        bodies = [(await client.send("GET", path)).text for path in LOOKS]
        assert (await cache_report(client)).nodes[0].text is None
    assert not [text for text in (*bodies, *process.output.lines) if any(secret in text for secret in SECRETS)]
