"""Connections that stall, and the order in which they are closed."""

import asyncio
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from typing import cast

import pytest
from aiohttp import web

from runner.engine.engine import Engine
from runner.engine.events import Started, Text
from runner.server import connections
from runner.server.routes import CONNECTIONS, make_app
from tests.unit.server.script import Script

HEAD = b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n"
BODY = b'{"Prompt":"xy"}'
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """The endpoints on a port of their own."""

    def __init__(self, port: int, app: web.Application) -> None:
        self.port = port
        self.connections = app[CONNECTIONS]

    async def open(self, sent: bytes = b"") -> Pair:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        await self.settle()
        return reader, writer

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0.001)


@pytest.fixture
async def served(engine: Script, helper: Executor) -> AsyncIterator[Served]:
    app = make_app(cast("Engine", engine), helper)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = await app[CONNECTIONS].serve(runner.server, listener)
        yield Served(listener.getsockname()[1], app)
        serving.close()
        await runner.cleanup()


async def is_closed(reader: asyncio.StreamReader, within_s: float = 0.2) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), within_s) is not None
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def test_beyond_the_bound_the_longest_idle_connection_is_closed(served: Served, engine: Script) -> None:
    served.connections.most = 4
    first = await served.open(HEAD + b"\r\n")
    assert (await first[0].readline()).split()[1] == b"200"
    busy = await served.open(POST + BODY)
    second, third = await served.open(), await served.open()
    first[1].write(HEAD + b"\r\n")  # the first one that came is not the one that was idle for longest
    await served.settle()
    fourth, fifth = await served.open(), await served.open()
    assert [await is_closed(reader) for reader, _ in (second, third, busy, fourth, fifth)] == [True] * 2 + [False] * 3
    assert engine.submitted, "whoever waits for an answer stays"
    for _, writer in (first, busy, second, third, fourth, fifth):
        writer.close()


async def test_a_client_that_closes_its_sending_side_has_left(served: Served, engine: Script) -> None:
    """As for Go's server, which a closed sending side tells that its client has gone."""
    _, writer = await served.open(POST + BODY)
    request = await engine.next()
    engine.tell(request, Started())
    writer.write_eof()
    async with asyncio.timeout(5):
        while not request.cancelled:
            await asyncio.sleep(0.01)
    writer.close()


async def test_an_endless_head_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    slow, silent, done = await served.open(HEAD), await served.open(), await served.open(HEAD + b"\r\n")
    again = await served.open(HEAD + b"\r\n")
    assert (await again[0].readline()).split()[1] == b"200"
    await served.settle()
    again[1].write(HEAD)
    assert await is_closed(slow[0], 5)
    assert await is_closed(again[0], 5)
    for reader, writer in (silent, done):
        writer.write(HEAD + b"Connection: close\r\n\r\n")
        assert b"200 OK" in await asyncio.wait_for(reader.read(), 5), "these had not begun one"


async def test_an_answer_that_nobody_reads_is_dropped(
    served: Served, engine: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.2)
    _, writer = await served.open(POST + BODY)
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # the stream's own transport
    request = await engine.next()
    engine.tell(request, Started())
    async with asyncio.timeout(10):
        while not request.cancelled:
            engine.tell(request, Text("x" * 60_000, [], None))
            await asyncio.sleep(0.01)
    assert "a client does not read its answer: closed" in caplog.messages
    writer.transport.abort()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what the parser of requests gets."""
    sizes: list[int] = []
    parse = web.RequestHandler.data_received

    def counted(protocol: web.RequestHandler, data: bytes) -> None:
        sizes.append(len(data))
        parse(protocol, data)

    monkeypatch.setattr(web.RequestHandler, "data_received", counted)
    return sizes


LARGE = 1 << 30


async def pour(writer: asyncio.StreamWriter, size: int) -> None:
    """Sends so many bytes of a body, without reading."""
    for _ in range(size >> 16):
        writer.write(bytes(1 << 16))
        await writer.drain()


async def test_the_rest_of_a_refused_body_is_dropped_unparsed(served: Served, parsed: list[int]) -> None:
    size = 64 << 20
    reader, writer = await served.open(
        b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size
    )
    await pour(writer, size)
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.split()[1] == b"404"
    assert sum(parsed) < 2 << 20
    writer.close()


async def test_of_a_very_large_refused_body_the_rest_is_not_even_taken(
    served: Served, parsed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_MOST_UNWANTED_BYTES", 1 << 20)
    drop, dropped = connections._Unwanted.drop, list[int]()

    def counted(unwanted: connections._Unwanted, size: int) -> None:
        dropped.append(size)
        drop(unwanted, size)

    monkeypatch.setattr(connections._Unwanted, "drop", counted)
    reader, writer = await served.open(
        b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % LARGE
    )
    pouring = asyncio.create_task(pour(writer, LARGE))
    head = await asyncio.wait_for(reader.readline(), 60)
    assert head.split()[1] == b"413"
    async with asyncio.timeout(60):
        while sum(dropped) <= 1 << 20:
            await asyncio.sleep(0.01)
    done, _ = await asyncio.wait([pouring], timeout=0.5)
    assert not done, "the client waits for a runner that has stopped to read"
    assert sum(dropped) < 2 << 20
    assert sum(parsed) < 2 << 20
    pouring.cancel()
    writer.transport.abort()


async def test_a_refused_body_of_unknown_length_may_end_as_well(served: Served, parsed: list[int]) -> None:
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader, writer = await served.open(head)
    writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n0\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), 60)).split()[1] == b"404"
    writer.close()
    await served.settle()
    assert not served.connections._busy
