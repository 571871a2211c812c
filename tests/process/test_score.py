"""`POST /v1/score`: what a host asks of a model that decides."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.tools.host.lib import Client, Process, spawn
from tests.process.conftest import HOST, RANDOM, RUNNER, read_stats

COMMON = "You decide. " * 40


@pytest.fixture(scope="module")
def process(models_dir: Path) -> Iterator[Process]:
    arguments = ["--prefill-chunk", "64"]
    with spawn(RUNNER, RANDOM, models_dir=models_dir, generation=HOST, arguments=arguments) as process:
        process.wait_ready(60)
        yield process


def rows(*prompts: str, candidates: str = "ABCD") -> list[dict[str, object]]:
    return [{"prompt": prompt, "candidates": [*candidates]} for prompt in prompts]


async def post(client: Client, wanted: Sequence[Mapping[str, object]], most: int = 1000) -> dict[str, Any]:
    reply = await client.send("POST", "/v1/score", json.dumps({"max_tokens": most, "rows": wanted}).encode())
    assert reply.status == 200, reply.body
    assert reply.body.endswith(b"}\n")
    return dict(json.loads(reply.body))


async def test_rows_are_scored_as_each_alone_and_a_repeat_comes_from_the_cache(process: Process) -> None:
    async with Client.of(process) as client:
        prompts = [f"{COMMON}{'question ' * number}{number}?" for number in range(12)]
        together = await post(client, rows(*prompts, COMMON, prompts[3], "x"))
        for prompt, values in zip(prompts, together["logits"], strict=False):
            alone = await post(client, rows(prompt))
            assert alone["logits"] == [pytest.approx(values, abs=1e-5)]
        counts = [len(await client.tokenize(prompt)) for prompt in (*prompts, COMMON, prompts[3], "x")]
        assert together["input_tokens"] == sum(counts)
        assert together["cached_tokens"] >= 11 * (counts[12] - 1)
        assert (await post(client, rows(prompts[11])))["cached_tokens"] == counts[11] - 1


async def test_a_client_that_leaves_leaves_no_row_behind(process: Process) -> None:
    async with Client.of(process) as client:
        before = (await read_stats(client)).requests.done
        long = rows(*(f"{number}" + "long " * 190 for number in range(64)))
        left = asyncio.create_task(post(client, long))
        while not (await read_stats(client)).requests.running:
            await asyncio.sleep(0.01)
        left.cancel()
        async with asyncio.timeout(60):
            while (await read_stats(client)).requests.running:
                await asyncio.sleep(0.01)
        assert (await read_stats(client)).requests.done - before < 60
