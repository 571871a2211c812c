"""The stream of a completion, beyond the conformance cases 36-52: our own stop strings, counts and log lines."""

import asyncio
import re

import pytest

from scripts.tools.conformance.assertions import quiet
from scripts.tools.host.lib import A, Client, F, Request, StatusError
from tests.process.conftest import MARKER, SpawnModel


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
