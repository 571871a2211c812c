"""The stream of a completion, beyond the conformance cases 36-52: our own stop strings, caches, keys and log lines."""

import asyncio
import json
import re

import pytest

from scripts.tools.conformance.assertions import ALPHABET, quiet
from scripts.tools.host.lib import A, Client, F, Request, StatusError
from tests.process.conftest import MARKER, RANDOM, SpawnModel

STOP, LENGTH = 0, 1


async def test_greedy_answers_of_a_random_model_repeat(start: SpawnModel) -> None:
    """Random weights make every layer matter. Runs with each cache."""
    prompts = ["the cat and the ring", "the cat and the", "the cat and the ring, then", "another one", "the cat and"]
    texts = []
    for kind in ("trie", "single", "none"):
        process = start(RANDOM, ["--cache", kind, "--prefill-chunk", "5"])
        async with Client.of(process) as client:
            texts.append([(await client.complete(Request(prompt, {"num_predict": 24}))).text for prompt in prompts])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


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


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["n"], "jklm"),
        (["lmn"], "jk"),
        (["zz", "pq", "mx"], "jklmno"),
        (["j"], ""),
        (["nope", "z!"], ALPHABET),
        ([""], ALPHABET),
        (["klm", "jklmn"], ""),
    ],
)
async def test_stop_strings_end_the_text_before_them(stop: list[str], text: str, client: Client) -> None:
    completion = await client.complete(Request("Hi", {"stop": stop}))
    assert completion.text == text
    assert completion.final.done_reason == STOP
    assert text.startswith("".join(completion.pieces))


async def test_text_held_back_for_a_stop_string_is_delivered_at_the_limit(client: Client) -> None:
    completion = await client.complete(Request("Hi", {"stop": ["lmnop"], "num_predict": 5}))
    assert completion.text == "jklmn"
    assert (completion.final.done_reason, completion.final.eval_count) == (LENGTH, 5)


async def test_the_last_line_has_these_keys_and_no_others(client: Client) -> None:
    body = json.loads((await client.complete(Request("Hi", {"num_predict": 4}))).lines[-1])
    assert body.keys() == {
        *("Content", "Done", "DoneReason", "done_reason", "PromptEvalCount", "prompt_eval_count"),
        *("PromptEvalDuration", "prompt_eval_duration", "EvalCount", "eval_count", "EvalDuration", "eval_duration"),
        *("Logprobs", "Error", "PromptEvalCachedCount"),
    }


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
    assert process.close() < 1.5
    quiet(process)


async def test_one_log_line_per_request_says_what_the_cache_did(start: SpawnModel) -> None:
    process = start()
    prompts = ("abcdefgh", "abcdefgh", "abcdXYZ!", "nothing of it!")
    async with Client.of(process) as client:
        for prompt in prompts:
            await client.complete(Request(prompt, {"num_predict": 2}))
    lines: list[dict[str, str]] = []
    async with asyncio.timeout(5):
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
