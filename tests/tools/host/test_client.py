"""The client reads streams as a host does, shown on a stand-in server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from scripts.tools.host.lib import A, Client, OutputScanner, Request, StatusError, StreamError

FINAL = b'{"Done":true,"EvalCount":1}\n'
Handler = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[TestServer]]]:
    """Serves a completion whose body the given handler writes, and a tokenize that counts characters."""
    servers = []

    async def start(handler: Handler) -> TestServer:
        async def completion(request: web.Request) -> web.StreamResponse:
            zipped = "zipped" in await request.text()
            response = web.StreamResponse(headers={"Content-Encoding": "gzip"} if zipped else {})
            await response.prepare(request)
            await handler(request, response)
            return response

        async def tokenize(request: web.Request) -> web.Response:
            return web.json_response(list(range(len(await request.text()))))

        async def moved(request: web.Request) -> web.Response:
            return web.Response(status=308, headers={"Location": "/v1/completions"})

        async def status(request: web.Request) -> web.Response:
            return web.Response(text='{"Memory":7}' if request.path == "/v1/status" else "ok")

        app = web.Application()
        app.add_routes(
            [
                web.get("/health", status),
                web.get("/v1/status", status),
                web.post("/completion", moved),
                web.post("/v1/completions", completion),
                web.post("/v1/tokenize", tokenize),
            ]
        )
        server = TestServer(app)
        servers.append(server)
        await server.start_server()
        return server

    yield start
    for server in servers:
        await server.close()


def client_of(server: TestServer, output: OutputScanner | None = None) -> Client:
    assert server.port is not None
    return Client(server.port, output=output)


async def test_redirects_keep_the_body_and_undecodable_lines_are_skipped(
    serve: Callable[[Handler], Awaitable[TestServer]],
) -> None:
    async def handler(request: web.Request, response: web.StreamResponse) -> None:
        prompt = (await request.json())["Prompt"]
        lines = [{"Content": prompt}, {"Content": "lost", "EvalCount": 1.5}, {"Content": "!"}]
        await response.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines) + FINAL)

    async with client_of(await serve(handler)) as client:
        completion = await client.complete(Request("hey"))
    assert completion.text == "hey!"
    assert len(completion.lines) == 4
    assert completion.final.eval_count == 1


async def test_errors_keep_their_status_and_an_aborted_body_is_one(
    serve: Callable[[Handler], Awaitable[TestServer]],
) -> None:
    async def handler(request: web.Request, response: web.StreamResponse) -> None:
        if (await request.json())["Prompt"] == "error":
            await response.write(b'{"Error":{"StatusCode":503,"Status":"","error":"busy"}}\n')
            return
        await response.write(b'{"Content":"a"}\n')
        assert request.transport is not None
        request.transport.close()

    server = await serve(handler)
    output = OutputScanner()
    async with client_of(server, output) as client:
        with pytest.raises(StatusError, match="busy") as refusal:
            await client.complete(Request("error"))
        assert (refusal.value.status, refusal.value.streamed) == (503, True)
        with pytest.raises(StreamError, match="unexpected EOF"):
            await client.complete(Request("abort"))
        output.feed(b"note: mlx: hello\n")
        with pytest.raises(StreamError, match="mlx runner failed: mlx: hello"):
            await client.complete(Request("abort"))


async def test_cancel_closes_the_connection(serve: Callable[[Handler], Awaitable[TestServer]]) -> None:
    closed = asyncio.Event()

    async def handler(request: web.Request, response: web.StreamResponse) -> None:
        try:
            while True:
                await response.write(b'{"Content":"a"}\n')
                await asyncio.sleep(0.005)
        finally:
            closed.set()

    async with client_of(await serve(handler)) as client:
        completion = await client.complete(Request("x"), cancel_after=3)
        await asyncio.wait_for(closed.wait(), 30)
    assert completion.cancelled
    assert completion.text == "aaa"
    assert client.generation is not A
