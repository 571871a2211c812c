"""The status endpoints beyond the conformance cases 15-20: their exact form and their access rules."""

import asyncio
import json
import statistics

import pytest

from scripts.tools.conformance.assertions import gone
from scripts.tools.conformance.scripted_model import CONTEXT, VOCABULARY
from scripts.tools.conformance.status import rounds
from scripts.tools.host.lib import Client, Process, Request
from scripts.tools.host.lib.answers import decode_status

LOCAL_ONLY = "only programs on this machine"


async def test_status_has_these_keys_and_the_real_memory(client: Client) -> None:
    body = json.loads((await client.send("GET", "/v1/status")).body)
    assert list(body) == ["Status", "Progress", "ContextLength", "Memory"]
    assert body["Memory"] > 2 * 512 * len(VOCABULARY) * 4, "at least the two float32 tables of the model"
    assert (await client.send("HEAD", "/v1/status")).status == 200


async def test_status_does_not_wait_for_slices(client: Client) -> None:
    """It does not even wait for the slice that is being computed."""
    prefill = asyncio.create_task(client.complete(Request("p" * (CONTEXT - 2), {"num_predict": 1})))
    await asyncio.sleep(0.2)
    taken = await rounds(client, prefill, 1, 60)
    await gone(prefill)
    assert len(taken) > 20
    assert statistics.median(taken) < 0.01


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("POST", "/health", 405), ("GET", "/completion", 405), ("DELETE", "/completion", 405)),
        *(("POST", "/completion/", 404), ("GET", "/v1/embeddings", 404)),
    ],
)
async def test_errors_are_plain_text(method: str, path: str, status: int, client: Client) -> None:
    reply = await client.send(method, path)
    text = {404: "404 page not found\n", 405: "Method Not Allowed\n"}[status]
    assert (reply.status, reply.text) == (status, text)
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:11434", "LOCALHOST:1"])
async def test_a_loopback_host_header_is_accepted(host: str, client: Client) -> None:
    assert (await client.send("GET", "/v1/status", headers={"Host": host})).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "192.168.1.5", "127.0.0.1@evil"]
)
async def test_a_foreign_host_header_is_refused(host: str, client: Client) -> None:
    for method, path in (("GET", "/v1/status"), ("POST", "/completion"), ("POST", "/v1/tokenize")):
        assert (await client.send(method, path, b"{}", {"Host": host})).status == 403


@pytest.mark.parametrize("origin", ["http://localhost", "http://localhost:3000", "https://127.0.0.1", "http://[::1]:5"])
async def test_a_loopback_origin_is_accepted(origin: str, client: Client) -> None:
    assert (await client.send("GET", "/v1/status", headers={"Origin": origin})).status == 200


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://localhost.evil.example", "null", "http://localhost@evil.example", "file://", "x"],
)
async def test_a_foreign_origin_is_refused(origin: str, client: Client) -> None:
    body = b'{"Prompt":"Hi"}'
    reply = await client.send("POST", "/completion", body, {"Origin": origin, "Content-Type": "text/plain"})
    assert reply.status == 403
    assert LOCAL_ONLY in reply.text


async def test_a_simple_get_finds_nothing_that_is_not_json(shared: Process, client: Client) -> None:
    """A host's readiness poll is a bare request on a new connection."""
    assert shared.poll_ready(1)
    decode_status((await client.send("GET", "/v1/status?x=1")).body)
