"""How much of a body is read, and what is not unpacked."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from runner.errors import RequestError
from runner.server import bodies

Client = TestClient[web.Request, web.Application]


@pytest.fixture
async def client(aiohttp_client: Callable[..., Awaitable[Client]]) -> Client:
    """Of a server that answers with what it has read."""

    async def echo(http: web.Request) -> web.Response:
        try:
            return web.Response(body=await bodies.read_body(http))
        except RequestError as error:
            return web.Response(status=error.status, text=str(error))

    app = web.Application(handler_args={"auto_decompress": False})
    app.router.add_post("/", echo)
    return await aiohttp_client(TestServer(app))


async def test_a_body_is_read_whole(client: Client) -> None:
    body = bytes(range(256)) * 20_000
    assert await (await client.post("/", data=body)).read() == body
    assert await (await client.post("/")).read() == b""


async def test_a_body_without_end_is_refused_before_it_fills_the_memory(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MOST_BYTES", 1000)
    assert (await client.post("/", data=bytes(1000))).status == 200
    refused = await client.post("/", data=bytes(1001))
    assert (refused.status, await refused.text()) == (413, "a body has at most 1000 bytes")

    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"64\r\n" + bytes(100))
    for _ in range(10):
        writer.write(b"\r\n64\r\n" + bytes(100))
    head = await asyncio.wait_for(reader.readline(), 5)  # while the body is still going on
    writer.close()
    assert head.split()[1] == b"413"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP", "identity, gzip"])
async def test_a_compressed_body_is_a_bad_request(encoding: str, client: Client) -> None:
    response = await client.post("/", data=b"x", headers={"Content-Encoding": encoding})
    assert (response.status, await response.text()) == (400, "Bad Request")
