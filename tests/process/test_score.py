"""`POST /v1/score`: what a host asks of a model that decides."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from scripts.tools.host.lib import Client, Process, Request
from tests.process.conftest import RANDOM, SpawnModel, read_stats

COMMON = "You decide. " * 40


@pytest.fixture(params=["trie", "single"])
def process(request: pytest.FixtureRequest, start: SpawnModel) -> Process:
    return start(RANDOM, ["--cache", request.param, "--prefill-chunk", "64"])


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


async def test_scores_are_the_log_probabilities_of_a_completion(process: Process) -> None:
    async with Client.of(process) as client:
        completion = await client.complete(Request("Say: ", {"num_predict": 1}, logprobs=True, top_logprobs=20))
        (entry,) = [entry for answer in completion.answers for entry in answer.logprobs or ()]
        wanted = {top.token: top.logprob for top in entry.top if top.token.isascii() and len(top.token) == 1}
        scores = await post(client, rows("Say: ", candidates="".join(wanted)))
        assert scores["logits"] == [pytest.approx([*wanted.values()], abs=1e-5)]


async def test_scores_beside_answers_change_neither(process: Process) -> None:
    async with Client.of(process) as client:
        prompts = [f"{COMMON}{number}" for number in range(8)]
        request = Request("Once upon a time", {"num_predict": 60, "temperature": 0})
        quiet, alone = await client.complete(request), [await post(client, rows(prompt)) for prompt in prompts]
        busy, *scores = await asyncio.gather(
            client.complete(request), *(post(client, rows(*prompts)) for _ in range(4))
        )
        assert busy.text == quiet.text
        for each in scores:
            assert each["logits"] == [pytest.approx(one["logits"][0], abs=1e-5) for one in alone]


async def test_a_client_that_leaves_leaves_no_row_behind(process: Process) -> None:
    async with Client.of(process) as client:
        long = rows(*(f"{number}" + "long " * 190 for number in range(64)))
        left = asyncio.create_task(post(client, long))
        while not (await read_stats(client)).requests.running:
            await asyncio.sleep(0.01)
        left.cancel()
        async with asyncio.timeout(60):
            while (await read_stats(client)).requests.running:
                await asyncio.sleep(0.01)
        assert (await read_stats(client)).requests.done < 60


PROMPTS, TOKENS = "scoring requires 1\u201364 prompts", "max_tokens must be between 1 and 65536"
REFUSALS = {
    "no rows": ({"max_tokens": 9}, PROMPTS),
    "65 rows": ({"max_tokens": 9, "rows": rows("a") * 65}, PROMPTS),
    "no max_tokens": ({"rows": rows("a")}, TOKENS),
    "more than the context": ({"MAX_TOKENS": 65537, "Rows": rows("a")}, TOKENS),
    "an empty prompt": ({"max_tokens": 9, "rows": rows("a", "")}, "prompt 1 has 0 tokens; expected 1\u20139 (input"),
    "a long prompt": ({"max_tokens": 1, "rows": rows("xyzzy")}, "expected 1\u20131 (input is never truncated)"),
    "a very long prompt": ({"max_tokens": 9, "rows": rows("x" * 3_000_000)}, "expected 1\u20139 (input is never trunc"),
    "no candidates": ({"max_tokens": 9, "rows": [{"prompt": "a"}]}, "prompt 0 requires 1\u201326 candidates"),
    "27 candidates": (
        {"max_tokens": 9, "rows": rows("a", candidates="A" * 27)},
        "prompt 0 requires 1\u201326 candidates",
    ),
    "two tokens": (
        {"max_tokens": 9, "rows": [{"prompt": "a", "candidates": ["A", "zq\n"]}]},
        'candidate "zq\\n" must append exactly one ordinary token to prompt 0',
    ),
    "an empty candidate": (
        {"max_tokens": 9, "rows": [{"prompt": "a", "candidates": [""]}]},
        'candidate "" must append',
    ),
    "equal candidates": (
        {"max_tokens": 9, "rows": rows("a", candidates="ABA")},
        "prompt 0 has invalid or duplicate candidate tokens",
    ),
    "no object": ([], ""),
    "a word for a number": ({"max_tokens": "9"}, ""),
}


@pytest.mark.parametrize("what", REFUSALS)
async def test_what_cannot_be_scored_is_refused_in_the_words_that_hosts_know(what: str, client: Client) -> None:
    body, text = REFUSALS[what]
    reply = await client.send("POST", "/v1/score", json.dumps(body).encode())
    assert reply.status == 400
    assert text in reply.body.decode()
