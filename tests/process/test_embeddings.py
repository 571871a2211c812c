"""`POST /v1/embeddings` of a process: many texts at once, beside a long one, for clients that leave."""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.stats import EmbeddingCounts
from scripts.tools.host.lib import Client, Process, spawn
from scripts.tools.models.sources import write_source
from scripts.tools.models.store import write_store
from tests.process.conftest import HOST, RUNNER, read_stats, running

TEXTS = [f"text {'and more ' * (number % 5)}{number}" for number in range(64)]
LONG = "a long text " * 300


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embeddings")
    write_store(root / "models", "e", write_source(root / "source", "embedding-gemma2"))
    return root / "models"


@pytest.fixture(scope="module")
def process(models: Path) -> Iterator[Process]:
    with running("e", models) as process:
        yield process


async def counts(client: Client) -> EmbeddingCounts:
    """The numbers as they are now: younger ones than a fifth of a second are not asked for again."""
    await asyncio.sleep(0.25)
    return (await read_stats(client)).embeddings


async def embedded(client: Client, text: str, **more: object) -> dict[str, Any]:
    reply = await client.send("POST", "/v1/embeddings", json.dumps({"content": text, **more}).encode())
    assert reply.status == 200, reply.body
    return dict(json.loads(reply.body))


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


async def test_texts_at_once_are_as_each_alone_in_few_forwards(process: Process) -> None:
    async with Client.of(process) as client:
        alone = [await embedded(client, text) for text in TEXTS]
        before = await counts(client)
        together = await asyncio.gather(*(embedded(client, text) for text in TEXTS))
        after = await counts(client)
        for text, one, other in zip(TEXTS, alone, together, strict=True):
            assert one["prompt_eval_count"] == len(await client.tokenize(text)) + 2
            assert one["prompt_eval_count"] == other["prompt_eval_count"]
            assert cosine(one["embedding"], other["embedding"]) > 1 - 1e-6
            assert abs(math.hypot(*one["embedding"]) - 1) < 1e-5
            assert len(one["embedding"]) == 768
        assert min(cosine(alone[0]["embedding"], each["embedding"]) for each in alone[1:]) < 0.999
        assert after.texts - before.texts == len(TEXTS)
        assert after.forwards - before.forwards <= len(TEXTS) // 4


async def test_short_texts_do_not_wait_for_a_long_one(process: Process) -> None:
    async with Client.of(process) as client:
        long = asyncio.ensure_future(embedded(client, LONG))
        short = asyncio.ensure_future(embedded(client, "short"))
        done, _ = await asyncio.wait((long, short), return_when=asyncio.FIRST_COMPLETED)
        assert done == {short}
        assert (await long)["prompt_eval_count"] > 2000


async def test_a_client_that_leaves_ends_its_text(process: Process) -> None:
    async with Client.of(process) as client:
        before = await counts(client)
        leaving = [asyncio.ensure_future(embedded(client, LONG)) for _ in range(20)]
        await asyncio.sleep(0.05)  # the first of them is computed, the others wait
        for each in leaving:
            each.cancel()
        await embedded(client, "stays")
        after = await counts(client)
        assert after.waiting == 0
        assert after.texts - before.texts < len(leaving)


async def test_a_recording_is_refused_before_it_serves(models: Path, tmp_path: Path) -> None:
    arguments = ["--record", str(tmp_path / "tape")]
    with spawn(RUNNER, "e", models_dir=models, generation=HOST, arguments=arguments) as refused:
        assert await asyncio.to_thread(refused.wait, 60.0) == 1
    assert any("Error: --record records answers, and this model makes none" in line for line in refused.output.lines)
