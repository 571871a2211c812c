"""`POST /v1/score`: what a host asks of a model that decides."""

import asyncio
import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.tools.conformance.models import SEEING
from scripts.tools.host.lib import Client, Medium, Process, Request
from scripts.tools.models.png import png
from tests.process.conftest import RANDOM, SpawnModel, read_stats, running

COMMON = "You decide. " * 40


@pytest.fixture(scope="module")
def process(models_dir: Path) -> Iterator[Process]:
    with running(RANDOM, models_dir, "--prefill-chunk", "64") as process:
        yield process


def rows(*prompts: str, candidates: str = "ABCD") -> list[dict[str, object]]:
    return [{"prompt": prompt, "candidates": [*candidates]} for prompt in prompts]


async def post(client: Client, wanted: Sequence[Mapping[str, object]], **more: object) -> dict[str, Any]:
    body = {"max_tokens": 1000, "rows": wanted, **more}
    reply = await client.send("POST", "/v1/score", json.dumps(body).encode())
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


async def test_a_new_prompt_is_answered_while_known_rows_keep_coming(process: Process) -> None:
    """A row that is known begins at once, and is done with its first logits."""
    async with Client.of(process) as client:
        known, asked, most = rows(*[COMMON] * 16), 0, 200
        await post(client, known)

        async def score() -> None:
            nonlocal asked
            while asked < most:
                asked += 1
                await post(client, known)

        crowd = [asyncio.create_task(score()) for _ in range(16)]
        while asked < 20:
            await asyncio.sleep(0.001)
        await client.complete(Request("a new prompt " * 60, {"num_predict": 1}))
        assert asked < most, "it was answered when the others had ended"
        asked = most
        await asyncio.gather(*crowd)


async def both(client: Client, prompt: str, *media: Medium) -> tuple[list[float], list[float]]:
    """Returns the log-probabilities of the completion of a prompt, and its scores: it has as many tokens."""
    request = Request(prompt, {"num_predict": 1}, logprobs=True, top_logprobs=20, media=media)
    completion = await client.complete(request)
    (entry,) = [entry for answer in completion.answers for entry in answer.logprobs or ()]
    wanted = {top.token: top.logprob for top in entry.top if top.token.isascii() and len(top.token) == 1}
    assert len(wanted) > 5
    sent = [{"id": number, "data": base64.b64encode(each.data).decode()} for number, each in enumerate(media)]
    scores = await post(client, rows(prompt, candidates="".join(wanted)), Media=sent)
    assert scores["input_tokens"] == completion.final.prompt_eval_count
    (found,) = scores["logits"]
    return [*wanted.values()], found


async def test_scores_of_pictures_are_those_of_a_completion(start: SpawnModel) -> None:
    async with Client.of(start(SEEING)) as client:
        for colour in ((220, 20, 30), (10, 20, 230)):
            wanted, found = await both(client, "[img-0] What is it? ", Medium(png(64, 48, colour)))
            assert found == pytest.approx(wanted, abs=1e-5)
        stats = await read_stats(client)
        assert stats.media.encoded == 2
