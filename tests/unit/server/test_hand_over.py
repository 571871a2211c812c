"""The costs of a step on its way from the engine thread to the sockets, in counts: wake-ups, sends, tasks, bytes."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, cast

import pytest
from aiohttp import web

from protocol import DoneReason, Logprob, Metrics, content_lines
from runner.engine.events import Event, EventStream, Finished, Outbox, Started, Text
from runner.engine.request import Request
from runner.server import routes
from runner.server.completion import ResponseBody
from tests.unit.server.script import Client, Script

STEPS = 20
WAKE = b"\0"
BODY = 'Content-Length: 15\r\n\r\n{"Prompt":"xy"}'
END = Finished(DoneReason.STOP, Metrics())


class Opened(NamedTuple):
    """One answer that has begun."""

    request: Request
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Sent:
    """All bytes sent over sockets of this process, in order; a wake-up of the event loop is a byte to itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data: list[bytes] = []
        send = socket.socket.send

        def spy(to: socket.socket, data: bytes, *flags: int) -> int:
            self.data.append(bytes(data))
            return send(to, data, *flags)

        monkeypatch.setattr(socket.socket, "send", spy)

    @property
    def wakes(self) -> int:
        return self.data.count(WAKE)

    @property
    def content(self) -> list[bytes]:
        return [data for data in self.data if data != WAKE]


@asynccontextmanager
async def streams_of(client: Client, engine: Script, count: int = 1) -> AsyncIterator[list[Opened]]:
    """Answers that have begun, their heads have been read; in the end their clients leave."""
    opened = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"POST /completion HTTP/1.1\r\nHost: localhost\r\n{BODY}".encode())
        request = await engine.next()
        engine.tell(request, Started())
        async with asyncio.timeout(5):
            await reader.readuntil(b"\r\n\r\n")
        opened.append(Opened(request, reader, writer))
    try:
        yield opened
    finally:
        for one in opened:
            one.writer.close()


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[object]:
    """Grows by one whenever that is called."""
    calls, original = list[object](), getattr(owner, name)

    def call(*arguments: object, **words: object) -> object:
        calls.append(arguments)
        return original(*arguments, **words)

    monkeypatch.setattr(owner, name, call)
    return calls


def line(text: str) -> bytes:
    return b'{"Content":"%b","Done":false}\n' % text.encode()


def chunk(lines: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(lines), lines)


def tell_all(outbox: Outbox, opened: list[Opened], event: Event) -> None:
    for one in opened:
        outbox.put(one.request.stream, event)
    outbox.send()


@pytest.mark.parametrize("streams", [1, 4])
async def test_a_step_wakes_the_loop_once_and_sends_once_for_each_stream(
    streams: int, client: Client, engine: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No task is made for a line, none is woken, and no byte is sent but the line and its frame."""
    async with streams_of(client, engine, streams) as opened:
        outbox = Outbox(asyncio.get_running_loop())
        tasks = counted(monkeypatch, asyncio.get_running_loop(), "create_task")
        waits = counted(monkeypatch, EventStream, "batch")
        sent = Sent(monkeypatch)
        for step in range(STEPS):
            tell_all(outbox, opened, Text(f"{step}", [], None))
            async with asyncio.timeout(5):
                for one in opened:
                    assert await one.reader.readexactly(len(chunk(line(f"{step}")))) == chunk(line(f"{step}"))
        assert sent.wakes == STEPS
        assert sent.content == [chunk(line(f"{step}")) for step in range(STEPS) for _ in opened]
        assert (tasks, waits) == ([], [])


async def test_the_last_lines_and_the_end_of_the_body_are_sent_together(
    client: Client, engine: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with streams_of(client, engine) as [one]:
        sent = Sent(monkeypatch)
        engine.tell(one.request, Text("a", [], None), END)
        async with asyncio.timeout(5):
            rest = await one.reader.readuntil(b"\r\n0\r\n\r\n")
        assert sent.content == [rest]
        assert [json.loads(part)["Done"] for part in rest.splitlines() if part.startswith(b"{")] == [False, True]


async def test_events_that_wait_for_the_loop_take_one_wake_up_and_one_send(
    client: Client, engine: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with streams_of(client, engine, 2) as opened:
        outbox = Outbox(asyncio.get_running_loop())
        lines = b"".join(line(f"{step}") for step in range(STEPS))
        sent = Sent(monkeypatch)
        for step in range(STEPS):
            tell_all(outbox, opened, Text(f"{step}", [], None))
        async with asyncio.timeout(5):
            for one in opened:
                assert await one.reader.readexactly(len(chunk(lines))) == chunk(lines)
        assert (sent.wakes, sent.content) == (1, [chunk(lines)] * 2)


async def test_a_line_that_cannot_be_written_breaks_off_its_own_answer_and_no_other(
    client: Client, engine: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are told in one step, the broken one first."""

    def fail(text: str, logprobs: list[Logprob], metrics: Metrics | None) -> list[bytes]:
        if text == "bad":
            raise ValueError("broken on purpose")
        return content_lines(text, logprobs, metrics)

    monkeypatch.setattr("runner.server.completion.content_lines", fail)
    async with streams_of(client, engine, 2) as opened:
        outbox = Outbox(asyncio.get_running_loop())
        for one, text in zip(opened, ("bad", "good"), strict=True):
            outbox.put(one.request.stream, Text(text, [], None))
        outbox.send()
        async with asyncio.timeout(5):
            assert await opened[0].reader.read() == b""
            assert await opened[1].reader.readexactly(len(chunk(line("good")))) == chunk(line("good"))
        assert [one.request.cancelled for one in opened] == [True, False]
        assert [record.message for record in caplog.records if record.name == routes.__name__] == ["a request failed"]
        tell_all(outbox, opened, Text("later", [], None))  # the engine has not seen yet that one of them is over
        async with asyncio.timeout(5):
            await opened[1].reader.readuntil(chunk(line("later")))


class Connection:
    """Stands in for a connection and its transport."""

    def __init__(self) -> None:
        self.transport = self
        self.closing = False
        self.written: list[bytes] = []

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.written.append(data)


async def test_nothing_is_written_to_a_connection_that_closes() -> None:
    connection = Connection()
    written = ResponseBody(cast("web.RequestHandler", connection), chunked=True)
    written.write_events([Text("a", [], None)])
    connection.closing = True
    written.write_events([Text("b", [], None)])
    written.write_events([Text("c", [], None), END])
    assert connection.written == [chunk(line("a"))]
    with pytest.raises(ConnectionResetError):
        await written.rest


async def test_events_come_complete_and_in_order_however_the_threads_take_turns() -> None:
    """The loop is behind most of the time; `follow` comes in the middle."""
    outbox, stream, told, count = Outbox(asyncio.get_running_loop()), EventStream(), list[Event](), 5_000
    arrived = asyncio.Event()

    def read(events: list[Event]) -> None:
        told.extend(events)
        if told[-1] is END:
            arrived.set()

    def feed() -> None:
        for number in range(count):
            outbox.put(stream, Text(f"{number}", [], None))
            outbox.send()
        outbox.put(stream, END)
        outbox.send()

    feeding = threading.Thread(target=feed)
    feeding.start()
    async with asyncio.timeout(30):
        told += await stream.batch()
        if told[-1] is not END:
            stream.follow(read)
            await arrived.wait()
    feeding.join()
    assert told == [*(Text(f"{number}", [], None) for number in range(count)), END]
