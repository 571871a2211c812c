"""The stream of a completion, beyond the conformance cases 36-52: our own stop strings, counts and log lines."""

import asyncio
import json
import re

import pytest

from scripts.tools.conformance.assertions import quiet
from scripts.tools.host.lib import A, Client, F, Request, StatusError
from tests.process.conftest import MARKER, SpawnModel

STOP = 0


async def test_many_logprobs_are_split_into_lines_that_a_host_can_read(client: Client) -> None:
    """A stop string that almost matches holds 1000 tokens back, then releases them at once."""
    stop = "1234567890" * 100 + "x"
    completion = await client.complete(
        Request("0", {"stop": [stop], "num_predict": 1200}, logprobs=True, top_logprobs=20)
    )
    assert completion.text == "1234567890" * 120
    entries = [entry for answer in completion.answers for entry in answer.logprobs or ()]
    assert [entry.token for entry in entries] == list(completion.text)
    assert max(map(len, completion.lines)) < 65535


async def test_stop_strings_end_the_text_before_them(client: Client) -> None:
    completion = await client.complete(Request("Hi", {"stop": ["zz", "pq", "mx"]}))
    assert (completion.text, completion.final.done_reason) == ("jklmno", STOP)


async def test_the_last_line_counts_cached_tokens(client: Client) -> None:
    for wanted in (0, 17):
        body = json.loads((await client.complete(Request("~ counted twice ~y"))).lines[-1])
        assert (body["PromptEvalCount"], body["PromptEvalCachedCount"]) == (18, wanted)


async def test_markers_in_names_and_prompts_do_not_reach_the_log(start: SpawnModel) -> None:
    """Runs with hosts of two generations, at the most verbose log level."""
    process = start(MARKER, environment={"OLLAMA_DEBUG": "2"})
    async with Client.of(process) as client:
        for prompt in ("Hi", "Error: mlx: out of memory x", "panic: x"):
            await client.complete(Request(prompt, F.default_options), tokenize=True)
        await client.complete(Request("0"), cancel_after=3)
        with pytest.raises(StatusError):
            await client.complete(Request(""))
        await client.send("POST", "/Error:%20mlx:", b"x")
        await client.send("GET", "/v1/status", headers={"Origin": "error: mlx:"})
    async with Client(process.port, A) as old, asyncio.timeout(60):
        await old.complete(Request("Hi", None))
    process.close()
    quiet(process)


async def test_one_log_line_per_request_says_what_the_cache_did(start: SpawnModel) -> None:
    process = start()
    prompts = ("abcdefgh", "abcdefgh", "abcdXYZ!", "nothing of it!")
    async with Client.of(process) as client:
        for prompt in prompts:
            await client.complete(Request(prompt, {"num_predict": 2}))
    lines: list[dict[str, str]] = []
    async with asyncio.timeout(60):
        while len(lines) < len(prompts):
            await asyncio.sleep(0.02)
            lines = [
                {key: value.strip('"') for key, value in re.findall(r' (\w+)=("[^"]*"|\S+)', line)}
                for line in process.output.lines
                if " matched=" in line
            ]
    counts = [tuple(int(line[key]) for key in ("total", "matched", "cached", "left")) for line in lines]
    assert counts == [(8, 0, 0, 8), (8, 8, 7, 1), (8, 4, 4, 4), (14, 0, 0, 14)]
    assert [bool(line["miss"]) for line in lines] == [True, False, False, True]
