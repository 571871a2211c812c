"""Conformance cases 15-20: status, health, the small endpoints, and who may use them."""

import asyncio
import json
import statistics
import time

import pytest

from tests.host import Client, Process, Request, Stream
from tests.host.answers import decode_status
from tests.process.script import CONTEXT, VOCABULARY

LOCAL_ONLY = "only programs on this machine"


async def test_case_15_status_has_the_four_integers(client: Client) -> None:
    reply = await client.send("GET", "/v1/status")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("application/json")
    body = json.loads(reply.body)
    assert {key: type(value) for key, value in body.items()} == dict.fromkeys(
        ("Status", "Progress", "ContextLength", "Memory"), int
    )
    assert (body["Status"], body["Progress"], body["ContextLength"]) == (0, 100, CONTEXT)
    assert body["Memory"] > 2 * 512 * len(VOCABULARY) * 4, "at least the two float32 tables of the model"


async def test_case_16_health_is_answered_directly(client: Client) -> None:
    reply = await client.send("GET", "/health")
    assert reply.status == 200
    assert decode_status(reply.body).context_length == CONTEXT
    assert (await client.send("HEAD", "/v1/status")).status == 200


async def latencies(client: Client, busy: asyncio.Task[object], at_once: int = 1) -> list[float]:
    """Seconds that each round of `at_once` status calls took, up to 60 rounds while `busy` runs."""
    taken: list[float] = []
    while not busy.done() and len(taken) < 60:
        started = time.monotonic()
        await asyncio.gather(*(client.status() for _ in range(at_once)))
        taken.append(time.monotonic() - started)
        await asyncio.sleep(0.005)
    return taken


async def test_case_17_status_is_quick_during_a_long_prefill(client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        prefill = group.create_task(client.complete(Request("p" * (CONTEXT - 2), {"num_predict": 1}), cancel_after=1))
        await asyncio.sleep(0.2)
        taken = await latencies(client, prefill)
        prefill.cancel()
    assert len(taken) > 20
    assert max(taken) < 1.0
    assert statistics.median(taken) < 0.01


async def test_case_18_parallel_status_calls_are_quick_during_decode(client: Client) -> None:
    async with client.stream(Request("0")) as stream:
        async for answer in stream:
            assert not answer.done
            break
        drain = asyncio.create_task(_drain(stream))
        taken = await latencies(client, drain, at_once=8)
        drain.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drain
    assert len(taken) == 60
    assert max(taken) < 1.0
    assert statistics.median(taken) < 0.05


async def _drain(stream: Stream) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/status", "GET"),
        ("POST", "/health", "GET"),
        ("GET", "/completion", "POST"),
        ("GET", "/v1/completions", "POST"),
        ("GET", "/v1/tokenize", "POST"),
        ("DELETE", "/completion", "POST"),
    ],
)
async def test_case_19_a_wrong_method_is_405_and_says_which_is_right(
    method: str, path: str, allowed: str, client: Client
) -> None:
    reply = await client.send(method, path)
    assert reply.status == 405
    assert allowed in reply.headers["allow"]
    assert reply.text == "Method Not Allowed\n"
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/nope", "/", "/v1/score", "/v1/embeddings", "/completion/", "/v1/status/x"])
async def test_case_19_an_unknown_path_is_404(path: str, client: Client) -> None:
    for method in ("GET", "POST"):
        reply = await client.send(method, path)
        assert (reply.status, reply.text) == (404, "404 page not found\n")


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/models"), ("POST", "/load")])
async def test_case_20_models_and_load_succeed(method: str, path: str, client: Client) -> None:
    reply = await client.send(method, path)
    assert (reply.status, json.loads(reply.body)) == (200, {"Success": True})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:11434", "LOCALHOST:1"])
async def test_a_loopback_host_header_is_welcome(host: str, client: Client) -> None:
    assert (await client.send("GET", "/v1/status", headers={"Host": host})).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "192.168.1.5", "127.0.0.1@evil"]
)
async def test_a_host_header_of_elsewhere_is_refused(host: str, client: Client) -> None:
    for method, path in (("GET", "/v1/status"), ("POST", "/completion"), ("POST", "/v1/tokenize")):
        assert (await client.send(method, path, b"{}", {"Host": host})).status == 403


@pytest.mark.parametrize("origin", ["http://localhost", "http://localhost:3000", "https://127.0.0.1", "http://[::1]:5"])
async def test_a_loopback_origin_is_welcome(origin: str, client: Client) -> None:
    assert (await client.send("GET", "/v1/status", headers={"Origin": origin})).status == 200


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost.evil.example", "null", "http://localhost@evil.example", "file://", "x"],
)
async def test_a_web_page_is_refused(origin: str, client: Client) -> None:
    body = b'{"Prompt":"Hi"}'
    reply = await client.send("POST", "/completion", body, {"Origin": origin, "Content-Type": "text/plain"})
    assert reply.status == 403
    assert LOCAL_ONLY in reply.text


async def test_a_simple_get_finds_nothing_that_is_not_json(shared: Process, client: Client) -> None:
    """A host's readiness poll is a bare request on a new connection."""
    assert shared.poll_ready(1)
    decode_status((await client.send("GET", "/v1/status?x=1")).body)
