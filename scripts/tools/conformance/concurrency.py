"""Cases 75-80: several requests at once, clients that go away, connections that stay."""

import asyncio
import http.client
import itertools
import json
import time

from scripts.tools.conformance.assertions import ALPHABET, expect, generating, gone, long_prompt, quiet, under_way
from scripts.tools.conformance.cases import Section, once
from scripts.tools.conformance.runners import NotRunError, Target
from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import Client, Completion, Request

CONCURRENCY = Section("Concurrency and cancel")
TOO_SOON = "a prefill of the whole context was over too soon to be left"


@CONCURRENCY.case(75, "simultaneous", once)
async def simultaneous_requests_are_all_answered(target: Target) -> None:
    """Simultaneous requests all get their own answers; a runner that serves one at a time keeps their order."""
    client = await target.client()
    wanted = {"0": "1234567890" * 40, "5": "6789012345" * 4, "a": "bcdefghijk", "c": "defghijklm", "9": "0123456789"}
    tasks: list[asyncio.Task[Completion]] = []
    async with asyncio.TaskGroup() as group:
        for name, text in wanted.items():
            request = Request(f"one of many {name}", {"num_predict": len(text)})
            tasks.append(group.create_task(client.complete(request)))
            await asyncio.sleep(0.02)
    completions = [task.result() for task in tasks]
    for (name, text), completion in zip(wanted.items(), completions, strict=True):
        expect(f"text of {name}", completion.text, text)
    times = [(completion.arrivals[0], completion.arrivals[-1]) for completion in completions]
    in_order = sorted(times)
    serial = all(before[1] <= after[0] for before, after in itertools.pairwise(in_order))
    assert not serial or times == in_order, "they were served one after the other, and not in their order"


@CONCURRENCY.case(76, "left-in-prefill", once)
async def a_client_that_leaves_during_prefill_frees_the_queue(target: Target) -> None:
    """A client that leaves during a long prefill lets the next request start."""
    client, process = await target.client(), await target.process()
    started = time.monotonic()
    async with under_way(client.complete(Request(long_prompt(target), {"num_predict": 1}))) as prefill:
        await asyncio.sleep(0.15)
        async with under_way(client.complete(Request("Hi"))) as queued:
            await asyncio.sleep(0.05)
            over, waited = prefill.done() or queued.done(), time.monotonic() - started
            await gone(prefill)
            left = time.monotonic()
            completion = await asyncio.wait_for(queued, 60)
    expect("text of the next request", completion.text, ALPHABET)
    if over:
        raise NotRunError(TOO_SOON)
    whole_s = (await client.complete(Request(long_prompt(target), {"num_predict": 1}))).final.prompt_eval_duration / 1e9
    if whole_s < 4 * waited:
        raise NotRunError(TOO_SOON)
    late = completion.arrivals[0] - left
    assert late < whole_s / 4, f"it started {late:.2f} s later; a whole prefill takes {whole_s:.2f} s"
    quiet(process)


@CONCURRENCY.case(77, "left-in-queue", once)
async def a_client_that_leaves_the_queue_is_never_served(target: Target) -> None:
    """A client that leaves while its request is queued is never served."""
    start = target.runners.unheard()
    request = Request(start + "u" * (CONTEXT // 4), {"num_predict": 1})
    async with (
        target.spawn(environment={"OLLAMA_NUM_PARALLEL": "1"}) as process,
        Client(process.port, target.generation, process.output) as client,
    ):
        async with generating(client):
            async with under_way(client.complete(request)) as queued:
                await asyncio.sleep(0.2)
                if queued.done():
                    raise NotRunError("two requests are served at once: nobody waits")
            await asyncio.sleep(0.1)
        expect("the next answer", (await client.complete(Request("Hi"))).text, ALPHABET)
        final = json.loads((await client.complete(request)).lines[-1])
    cached = final.get("PromptEvalCachedCount")
    if cached is None:
        raise NotRunError("only PromptEvalCachedCount could show it")
    assert cached < len(start), f"{cached} tokens of a prompt that nobody waited for are in the cache"


@CONCURRENCY.case(78, "left-in-decode", once)
async def after_a_cancelled_decode_the_same_prompt_works(target: Target) -> None:
    """After a client left during its answer, the same prompt gets the same answer and the same counters."""
    client = await target.client()
    prompt = target.runners.unheard() + "3"
    whole = await client.complete(Request(prompt, {"num_predict": 50}))
    await client.complete(Request("in between x"))
    assert (await client.complete(Request(prompt), cancel_after=7)).cancelled, "there was nothing to cancel"
    again = await client.complete(Request(prompt, {"num_predict": 50}))
    expect("text", again.text, whole.text)
    expect("prompt tokens", [again.final.prompt_eval_count, whole.final.prompt_eval_count], [len(prompt)] * 2)


@CONCURRENCY.case(79, "left-at-the-end", once)
async def a_client_that_leaves_at_the_final_line_leaves_no_trace(target: Target) -> None:
    """A client that leaves at the final line causes no line of output."""
    process = await target.process()
    before = len(process.output.lines)
    for _ in range(20):
        expect("text", await target.text("w"), "xyz")
    await asyncio.sleep(0.2)
    quiet(process)
    traces = [line for line in process.output.lines[before:] if "level=ERROR" in line or "Traceback" in line]
    expect("lines about errors", traces, [])


@CONCURRENCY.case(80, "keep-alive", once)
async def a_connection_serves_one_request_after_the_other(target: Target) -> None:
    """One connection serves several requests in turn, refused ones too."""
    await asyncio.to_thread(stay, await target.port(), 0.0)


@CONCURRENCY.case(80, "idle-connection", once, slow=True)
async def an_idle_connection_lives_95_seconds(target: Target) -> None:
    """A connection that was idle for more than 90 seconds still serves."""
    await asyncio.to_thread(stay, await target.port(), 95.0)


def stay(port: int, idle_s: float) -> None:
    """Several requests on one connection, which is idle for so long in between."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.connect()
    kept = connection.sock
    try:
        for _ in range(2):
            for body, wanted in ((b'{"Prompt":"w"}', 200), (b"{", 400), (b'{"Prompt":"w"}', 200)):
                connection.request("POST", "/v1/completions", body)
                response = connection.getresponse()
                response.read()
                expect("status", response.status, wanted)
                assert connection.sock is kept, f"the connection was closed after status {wanted}"
            time.sleep(idle_s)
            idle_s = 0.0
    finally:
        connection.close()
