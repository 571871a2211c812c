"""Conformance cases 75-80: several requests at once, clients that go away, connections that stay."""

import asyncio
import http.client
import json
import time

import pytest

from tests.host import Client, Completion, Process, Request
from tests.process.script import CONTEXT

ALPHABET = "jklmnopqrstuvwxyz"


def long_prompt(first: str) -> str:
    """A prompt whose prefill takes seconds in small chunks, and shares nothing with another first letter's."""
    return first + "q" * (CONTEXT - 100)


async def test_case_75_simultaneous_requests_are_all_answered_in_order(client: Client) -> None:
    finished: list[str] = []

    async def run(name: str, request: Request) -> Completion:
        completion = await client.complete(request)
        finished.append(name)
        return completion

    requests = {"0": 600, "5": 40, "a": 10, "c": 0, "9": 5}
    async with asyncio.TaskGroup() as group:
        tasks = {}
        for name, count in requests.items():
            tasks[name] = group.create_task(run(name, Request(f"one of many {name}", {"num_predict": count})))
            await asyncio.sleep(0.03)
    texts = {name: task.result().text for name, task in tasks.items()}
    assert texts == {
        "0": "1234567890" * 60,
        "5": "6789012345" * 4,
        "a": "bcdefghijk",
        "c": "defghijklmnopqrstuvwxyz",
        "9": "01234",
    }
    assert finished == list(requests), "first come, first served"


async def test_twenty_at_once_are_each_answered_for_themselves(client: Client) -> None:
    prompts = [f"{number:02d} {letter}" for number, letter in enumerate("abcdefghijklmnopqrst")]
    completions = await asyncio.gather(*(client.complete(Request(prompt, {"num_predict": 4})) for prompt in prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        start = ord(prompt[-1]) + 1
        assert completion.text == "".join(map(chr, range(start, start + 4)))


async def test_headers_are_withheld_until_the_request_starts(client: Client) -> None:
    async with client.stream(Request("0")) as blocking:
        async for _ in blocking:
            break
        queued = asyncio.create_task(client.post_completion(Request("Hi")))
        await asyncio.sleep(0.3)
        assert not queued.done()
    response = await asyncio.wait_for(queued, 5)
    assert response.status == 200
    assert (await response.read()).count(b"\n") == len(ALPHABET) + 1


async def test_case_76_a_client_that_leaves_during_prefill_frees_the_queue(client: Client, shared: Process) -> None:
    prefill = asyncio.create_task(client.complete(Request(long_prompt("A"), {"num_predict": 1})))
    await asyncio.sleep(0.2)
    queued = asyncio.create_task(client.complete(Request("Hi")))
    await asyncio.sleep(0.1)
    assert not queued.done(), "the prefill was over too soon to prove anything"
    prefill.cancel()
    cancelled = time.monotonic()
    completion = await asyncio.wait_for(queued, 10)
    assert completion.text == ALPHABET
    rest = await client.complete(Request(long_prompt("B"), {"num_predict": 1}))
    assert completion.arrivals[0] - cancelled < rest.final.prompt_eval_duration / 1e9 / 4
    assert shared.output.captured == ""


async def test_case_77_a_client_that_leaves_the_queue_is_never_served(client: Client, shared: Process) -> None:
    async with client.stream(Request("0")) as blocking:
        async for _ in blocking:
            break
        queued = asyncio.create_task(client.complete(Request("u" * 777)))
        await asyncio.sleep(0.2)
        queued.cancel()
        await asyncio.sleep(0.2)
    assert (await client.complete(Request("Hi"))).text == ALPHABET
    assert not [line for line in shared.output.lines if " total=777 " in line and "matched=" in line]
    await client.complete(Request("u" * 777, {"num_predict": 1}))
    await asyncio.sleep(0.1)
    assert [line for line in shared.output.lines if " total=777 " in line], "this is how it would have shown"


async def test_case_78_after_a_cancelled_decode_the_same_prompt_works(client: Client) -> None:
    prompt = "a cancelled decode 3"
    whole = await client.complete(Request(prompt, {"num_predict": 50}))
    await client.complete(Request("in between x"))
    cancelled = await client.complete(Request(prompt), cancel_after=7)
    assert cancelled.cancelled
    again = await client.complete(Request(prompt, {"num_predict": 50}))
    assert again.text == whole.text
    assert again.final.prompt_eval_count == whole.final.prompt_eval_count == len(prompt)


async def test_clients_that_leave_while_tokens_are_written_leave_no_trace(client: Client, shared: Process) -> None:
    """A write to a connection that has just been closed is no error of ours: nothing but a quiet line tells of it."""
    before = len(shared.output.lines)
    for number in range(60):
        assert (await client.complete(Request("leaving 0"), cancel_after=1 + number % 5)).cancelled
    assert (await client.complete(Request("w"))).text == "xyz"
    assert shared.output.captured == ""
    assert [line for line in shared.output.lines[before:] if "level=ERROR" in line or "Traceback" in line] == []


async def test_a_cancelled_prefill_is_kept_for_the_retry(client: Client, shared: Process) -> None:
    """A host that timed out tries again: the second try starts where the first one was stopped."""
    prefill = asyncio.create_task(client.complete(Request(long_prompt("C"), {"num_predict": 1})))
    await asyncio.sleep(0.4)
    prefill.cancel()
    await asyncio.sleep(0.1)
    body = await client.complete(Request(long_prompt("C"), {"num_predict": 1}))
    cached = json.loads(body.lines[-1])["PromptEvalCachedCount"]
    assert 0 < cached < CONTEXT - 100


async def test_case_79_a_client_that_leaves_at_the_final_line_leaves_no_trace(client: Client, shared: Process) -> None:
    before = len(shared.output.lines)
    for _ in range(20):
        assert (await client.complete(Request("w"))).text == "xyz"
    await asyncio.sleep(0.2)
    assert shared.output.captured == ""
    assert [line for line in shared.output.lines[before:] if "level=ERROR" in line or "Traceback" in line] == []


def complete_on(connection: http.client.HTTPConnection) -> str:
    connection.request("POST", "/completion", b'{"Prompt":"w"}')
    lines = connection.getresponse().read().splitlines()
    return "".join(json.loads(line)["Content"] for line in lines)


def test_case_80_a_connection_serves_one_request_after_the_other(shared: Process) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=10)
    connection.connect()
    socket = connection.sock
    for _ in range(3):
        assert complete_on(connection) == "xyz"
        connection.request("GET", "/v1/status")
        assert connection.getresponse().read()
        connection.request("POST", "/completion", b"{")
        assert connection.getresponse().read() == b"Bad Request\n"
    assert connection.sock is socket, "not reconnected"
    connection.close()


@pytest.mark.slow
def test_case_80_an_idle_connection_lives_95_seconds(shared: Process) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=10)
    assert complete_on(connection) == "xyz"
    socket = connection.sock
    time.sleep(95)
    assert complete_on(connection) == "xyz"
    assert connection.sock is socket
    connection.close()
