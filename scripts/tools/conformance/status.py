"""Cases 15-20: status, health and the small endpoints."""

import asyncio
import json
import time

from scripts.tools.conformance.assertions import answered, drain, expect, generating, long_prompt, under_way
from scripts.tools.conformance.cases import Section, once, ready
from scripts.tools.conformance.runners import NotRunError, Target
from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import Client, Reply, Request
from scripts.tools.host.lib.answers import decode_status

STATUS = Section("Status")
SLOWEST_S = 1.0
FEWEST_LOOKS = 10
"""Fewer status calls than this during a prefill say nothing: it was over too soon."""


@STATUS.case(15, "status", once)
async def status_has_the_four_integers(target: Target) -> None:
    """`GET /v1/status` has the four integers: 0, 100, the context length, the memory in use."""
    reply = await (await target.client()).send("GET", "/v1/status")
    expect("status", reply.status, 200)
    body = json.loads(reply.body)
    for key in ("Status", "Progress", "ContextLength", "Memory"):
        assert type(body.get(key)) is int, f"{key} is {body.get(key)!r}"
    expect("integers", (body["Status"], body["Progress"], body["ContextLength"]), (0, 100, CONTEXT))
    assert body["Memory"] > 0, f"Memory is {body['Memory']}"


@STATUS.case(16, "ready-path", ready)
async def the_hosts_readiness_path_is_answered(target: Target) -> None:
    """The path that the host polls (`/health` or `/v1/status`) reports that a loaded runner is ready."""
    process = await target.process()
    client = Client(await target.port(), target.generation, process.output)
    async with client:
        reply = await client.send("GET", target.generation.ready_path)
    leads_to_status(reply)


@STATUS.case(16, "health", once)
async def health_is_answered(target: Target) -> None:
    """`GET /health` is the status, or leads to it."""
    leads_to_status(await (await target.client()).send("GET", "/health"))


def leads_to_status(reply: Reply) -> None:
    if reply.status == 308:
        expect("where it leads", reply.headers["location"], "/v1/status")
    else:
        expect("context length", decode_status(answered(reply)).context_length, CONTEXT)


async def rounds(client: Client, busy: asyncio.Task[object], at_once: int, most: int) -> list[float]:
    """Seconds that each round of `at_once` status calls took, while `busy` runs; none follows one that was too slow."""
    taken = [0.0]
    while not busy.done() and len(taken) <= most and taken[-1] < SLOWEST_S:
        started = time.monotonic()
        await asyncio.gather(*(client.status() for _ in range(at_once)))
        taken.append(time.monotonic() - started)
        await asyncio.sleep(0.005)
    return taken[1:]


@STATUS.case(17, "status-during-prefill", once)
async def status_is_quick_during_a_long_prefill(target: Target) -> None:
    """During a long prefill the status is answered within a second."""
    client = await target.client()
    async with under_way(client.complete(Request(long_prompt(target), {"num_predict": 1}))) as prefill:
        await asyncio.sleep(0.2)
        taken = await rounds(client, prefill, 1, 60)
    assert max(taken, default=0.0) < SLOWEST_S, f"a status call took {max(taken):.1f} s"
    if len(taken) < FEWEST_LOOKS:
        raise NotRunError("a prefill of the whole context was over too soon to look at the status during it")


@STATUS.case(18, "status-during-decode", once)
async def parallel_status_calls_are_quick_during_decode(target: Target) -> None:
    """During an answer eight status calls at once are answered within a second."""
    client = await target.client()
    async with generating(client) as stream, under_way(drain(stream)) as draining:
        taken = await rounds(client, draining, 8, 20)
    assert max(taken, default=0.0) < SLOWEST_S, f"eight status calls took {max(taken):.1f} s"
    expect("rounds of calls before the endless answer ended", len(taken), 20)


WRONG_METHODS = (
    ("POST", "/v1/status", "GET"),
    ("GET", "/v1/completions", "POST"),
    ("GET", "/v1/tokenize", "POST"),
    ("DELETE", "/v1/completions", "POST"),
)
"""Method, path, and the method that would be right."""


@STATUS.case(19, "wrong-method", once)
async def a_wrong_method_is_405(target: Target) -> None:
    """A wrong method on a known path is 405 and names the right one."""
    client = await target.client()
    for method, path, allowed in WRONG_METHODS:
        reply = await client.send(method, path)
        expect(f"status of {method} {path}", (reply.status, reply.text.strip()), (405, "Method Not Allowed"))
        assert allowed in reply.headers.get("allow", ""), f"{method} {path}: Allow does not name {allowed}"


@STATUS.case(19, "unknown-path", once)
async def an_unknown_path_is_404(target: Target) -> None:
    """An unknown path is 404."""
    client = await target.client()
    for path in ("/nope", "/v1", "/v1/status/x"):
        for method in ("GET", "POST"):
            reply = await client.send(method, path)
            expect(f"status of {method} {path}", (reply.status, reply.text.strip()), (404, "404 page not found"))


@STATUS.case(20, "models-and-load", once)
async def models_and_load_succeed(target: Target) -> None:
    """`/v1/models` succeeds, and so does `/load`, which may lead there."""
    client = await target.client()
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/models"), ("POST", "/load")):
        reply = await client.send(method, path)
        if path == "/load" and reply.status == 308:
            expect("where it leads", reply.headers["location"], "/v1/models")
            continue
        expect(f"{method} {path}", (reply.status, json.loads(reply.body or b"null")), (200, {"Success": True}))
