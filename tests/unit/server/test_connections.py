"""Connections that stall, and the order in which they are closed."""

import asyncio
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from aiohttp import web

from protocol import DoneReason, Metrics
from runner.engine.engine import Engine
from runner.engine.events import Finished, Started, Text
from runner.server import connections
from runner.server.app import CONNECTIONS, make_app
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
async def served(engine: Script) -> AsyncIterator[Served]:
    app = make_app(cast("Engine", engine), ThreadPoolExecutor(1))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = await app[CONNECTIONS].serve(runner.server, listener)
        yield Served(listener.getsockname()[1], app)
        serving.close()
        await runner.cleanup()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 0.2) is not None
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


async def test_an_endless_head_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    slow, silent, done = await served.open(HEAD), await served.open(), await served.open(HEAD + b"\r\n")
    again = await served.open(HEAD + b"\r\n")
    again[1].write(HEAD)
    assert await is_closed(slow[0])
    assert await is_closed(again[0])
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


async def test_an_answer_that_is_read_slowly_is_kept(
    served: Served, engine: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner always writes more than the client reads, for three times as long as a client may read nothing."""
    monkeypatch.setattr(connections, "UNREAD_S", 1.0)
    reader, writer = await served.open(POST + BODY)
    request = await engine.next()
    engine.tell(request, Started())
    until = asyncio.get_running_loop().time() + 3 * connections.UNREAD_S
    while asyncio.get_running_loop().time() < until:
        for _ in range(8):
            engine.tell(request, Text("x" * 60_000, [], None))
        for _ in range(4):
            await reader.read(100_000)
        await asyncio.sleep(0.01)
    assert not request.cancelled
    engine.tell(request, Finished(DoneReason.STOP, Metrics(prompt_eval_count=2, eval_count=1)))
    writer.transport.abort()
