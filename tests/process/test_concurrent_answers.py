"""Concurrent requests as a host sees them: each gets its own answer, and none is delayed by another's failure or
disconnect. `test_concurrency` tests when they start."""

import asyncio
import json
import signal
import statistics
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest

from scripts.tools.conformance.assertions import drain, expect, generating, gone, quiet, refused
from scripts.tools.conformance.scripted_model import CONTEXT, VOCABULARY
from scripts.tools.conformance.status import rounds
from scripts.tools.host.lib import OUT_OF_MEMORY, Client, Completion, Process, Request, Stream, StreamError
from tests.lib.patience import stretched
from tests.process.conftest import SpawnModel

DIGITS = "1234567890" * 60
WAIT_S = 60.0
TEXTS = {"0": DIGITS[:300], "5": DIGITS[5:205], "one more 9": DIGITS[9:120], "a": "bcdefghijk"}
"""Prompts and their answers."""


def ask(client: Client, prompt: str, **options: object) -> asyncio.Task[Completion]:
    """Requests as many tokens as the prompt's answer has."""
    request = Request(prompt, {"num_predict": len(TEXTS[prompt]), **options})
    return asyncio.create_task(client.complete(request))


def overlapping(completions: list[Completion]) -> bool:
    """Returns True if all of them had started before any ended."""
    return max(each.arrivals[0] for each in completions) < min(each.arrivals[-1] for each in completions)


async def test_concurrent_streams_do_not_mix(client: Client) -> None:
    longest = [prompt for prompt in TEXTS if len(TEXTS[prompt]) > 100]
    tasks = {prompt: ask(client, prompt) for prompt in TEXTS}
    completions = {prompt: await asyncio.wait_for(task, WAIT_S) for prompt, task in tasks.items()}
    assert {prompt: each.text for prompt, each in completions.items()} == TEXTS
    assert all(each.final.eval_count == len(TEXTS[prompt]) for prompt, each in completions.items())
    assert all(each.final.prompt_eval_count == len(prompt) for prompt, each in completions.items())
    assert overlapping([completions[prompt] for prompt in longest])


async def test_an_answer_does_not_depend_on_concurrent_requests(client: Client) -> None:
    """Sampled answers with log-probabilities, penalties and a stop string: alone, then among others."""
    drawn: dict[str, object] = {"temperature": 1.0, "seed": 7, "num_predict": 60}
    requests = [
        Request("W", drawn, logprobs=True, top_logprobs=2),
        Request("X", {**drawn, "repeat_penalty": 1.5, "repeat_last_n": 8}),
        Request("0", {"num_predict": 200, "stop": ["6789012345678"]}),
        Request("a"),
    ]
    alone = [await client.complete(request) for request in requests]
    together = await asyncio.wait_for(asyncio.gather(*map(client.complete, requests)), WAIT_S)
    for ours, theirs in zip(together, alone, strict=True):
        expect("text", ours.text, theirs.text)
        expect("tokens", ours.final.eval_count, theirs.final.eval_count)
        told, wanted = ([entry for each in one.answers for entry in each.logprobs or ()] for one in (ours, theirs))
        expect("tokens with log-probabilities", [each.token for each in told], [each.token for each in wanted])
        assert [each.logprob for each in told] == pytest.approx([each.logprob for each in wanted], abs=1e-4)


async def test_status_and_tokenize_answer_at_once_while_several_run(client: Client) -> None:
    async with AsyncExitStack() as running:
        streams = [await running.enter_async_context(generating(client)) for _ in range(3)]
        others = [asyncio.create_task(drain(stream)) for stream in streams]
        taken = await rounds(client, others[0], 2, 40)
        assert len(taken) > 5
        assert statistics.median(taken) < 0.1
        body = json.loads((await client.send("GET", "/v1/status")).body)
        assert body["Memory"] > 2 * 512 * len(VOCABULARY) * 4, "at least the two float32 tables of the model"
        for text in ("Hi", "another text", "z" * 5000):
            expect("tokens", await asyncio.wait_for(client.tokenize(text), WAIT_S), [*text.encode()])
        assert not any(other.done() for other in others), "they were running meanwhile"
        for other in others:
            await gone(other)


@pytest.mark.parametrize("leaving", [0, 1, 2])
async def test_a_disconnect_during_decode_does_not_affect_the_others(
    leaving: int, client: Client, shared: Process
) -> None:
    before = len(shared.output.lines)
    prompts = [prompt for prompt in TEXTS if len(TEXTS[prompt]) > 100]
    staying = {prompt: ask(client, prompt) for number, prompt in enumerate(prompts) if number != leaving}
    left = await client.complete(Request(prompts[leaving], {"num_predict": 5000}), cancel_after=40)
    assert left.cancelled
    for prompt, task in staying.items():
        expect("text", (await asyncio.wait_for(task, WAIT_S)).text, TEXTS[prompt])
    expect("the next one", (await client.complete(Request("w"))).text, "xyz")
    quiet(shared)
    lines = shared.output.lines[before:]
    assert not [line for line in lines if "level=ERROR" in line or "level=WARN" in line]


async def test_a_disconnect_during_prefill_does_not_affect_the_others(client: Client) -> None:
    answer = ask(client, "0")
    prompt = asyncio.create_task(client.complete(Request("L" + "q" * (CONTEXT - 100), {"num_predict": 1})))
    await asyncio.sleep(0.2)
    await gone(prompt)
    expect("text", (await asyncio.wait_for(answer, WAIT_S)).text, TEXTS["0"])


async def test_an_answer_continues_during_a_long_prefill(client: Client) -> None:
    """Its tokens keep arriving before the prefill ends."""
    told = 0

    async def count(stream: Stream) -> None:
        nonlocal told
        async for _ in stream:
            told += 1

    async with generating(client) as stream:
        counting = asyncio.create_task(count(stream))
        await asyncio.sleep(0.1)
        before = told
        long = await asyncio.wait_for(client.complete(Request("M" + "q" * 12_000, {"num_predict": 1})), WAIT_S)
        meanwhile = told - before
        await gone(counting)
    expect("tokens of the prompt", long.final.prompt_eval_count, 12_001)
    assert meanwhile > 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
async def test_a_signal_during_several_requests_ends_it_quietly(number: signal.Signals, start: SpawnModel) -> None:
    process = start(arguments=["--parallel", "3"])
    async with Client.of(process) as client, AsyncExitStack() as running:
        streams = [await running.enter_async_context(generating(client)) for _ in range(3)]
        ends = [asyncio.create_task(drain(stream)) for stream in streams]
        queued = asyncio.create_task(client.complete(Request("Hi")))
        await asyncio.sleep(0.1)
        process.send_signal(number)
        assert await asyncio.to_thread(process.wait, stretched(2.0)) == -number
        for end in (*ends, queued):
            with pytest.raises(StreamError):
                await asyncio.wait_for(end, 30)
    quiet(process)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--parallel", "1"], {"OLLAMA_NUM_PARALLEL": "4"}),
        ([], {"OLLAMA_NUM_PARALLEL": "1"}),
        (["--cache", "none"], {}),
    ],
    ids=["flag", "variable", "no-cache"],
)
async def test_with_one_place_requests_are_served_one_by_one(
    arguments: list[str], environment: dict[str, str], start: SpawnModel
) -> None:
    async with Client.of(start(arguments=arguments, environment=environment)) as client:
        tasks = []
        for prompt in TEXTS:
            tasks.append(ask(client, prompt))
            await asyncio.sleep(0.02)
        completions = [await asyncio.wait_for(task, WAIT_S) for task in tasks]
    assert [each.text for each in completions] == [*TEXTS.values()]
    # The client may see the end of one stream and the beginning of the next in either order.
    assert all(one.arrivals[-1] < other.arrivals[len(other.arrivals) // 2] for one, other in pairwise(completions))


async def test_only_a_request_that_can_never_fit_is_refused(start: SpawnModel) -> None:
    """After a first request the memory of a prompt can be estimated. One that is too long is refused with a 400 when it
    would start."""
    process = start(arguments=["--memory", "4MiB"])
    async with Client.of(process) as client:
        assert (await client.complete(Request("w"))).text == "xyz"
        answer = ask(client, "5")  # its layers never grow beyond their first 256 tokens, which just fit
        body = json.dumps({"Prompt": "q" * (CONTEXT - 100)}).encode()
        reply = await asyncio.wait_for(client.send("POST", "/completion", body), WAIT_S)
        refused(reply, reply.text.strip())
        assert f"the keys and values of {CONTEXT - 100} tokens take about " in reply.text
        assert "the budget is 4.2 MB" in reply.text
        assert not any(phrase in reply.text.lower() for phrase in OUT_OF_MEMORY), "hosts would unload other models"
        expect("text", (await asyncio.wait_for(answer, WAIT_S)).text, TEXTS["5"])
        assert (await client.complete(Request("w"))).text == "xyz"
    quiet(process)
