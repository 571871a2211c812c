"""A running process to be mistreated, and what must hold of it afterwards."""

import asyncio
import math
import os
import string
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from scripts.tools.host.lib import Client, F, Process, Request, capture
from scripts.tools.host.lib.usage import descriptors, rss_bytes
from scripts.tools.models.scripted import BYTES, Transition, write_scripted

MODEL = "victim:latest"
CONTEXT = 65536
GREETING = Request("Hi")
ANSWER = string.ascii_lowercase[9:]
"""What the model answers to it."""
LINE_LIMIT_BYTES = 4096
"""Of one log line: early hosts stop reading at 64 KiB, and a pipe takes this much whole."""
PATIENCE_S = 30.0
RETURN_S = 30.0
"""Memory may come back a little later."""
HOST = replace(F, request_timeout_s=300.0)
"""For a whole request, where a host would wait for ever."""
HOST_DEADLINE_S = 10.0
"""A host that waits longer for a status kills the runner."""
PLAIN_HEAD = b"Host: 127.0.0.1\r\n"
_END = len(BYTES)


def write_victim(directory: Path) -> Path:
    """After a letter the model says the next one, up to `z`; after a digit the next one without end; W to Z draw."""
    chains = [*pairwise(string.ascii_lowercase), *zip(string.digits, string.digits[1:] + "0", strict=True)]
    rows: dict[int, Transition] = {ord(before): ord(after) for before, after in chains}
    rows |= dict.fromkeys(map(ord, "WXYZ"), dict.fromkeys(map(ord, "WXYZ"), 0.0))
    special = {_END: "<|end|>"}
    return write_scripted(directory, BYTES, rows, [_END], special, context_length=CONTEXT, small_head=True)


def post(path: str, body: bytes, head: bytes = b"") -> bytes:
    """A request that closes its connection, as bytes."""
    start = f"POST {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    return start.encode() + PLAIN_HEAD + head + b"\r\n" + body


def completion(body: str) -> bytes:
    return post("/completion", body.encode())


class Victim:
    """The process, seen from outside."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def rss_bytes(self) -> int:
        return rss_bytes(self.process.pid)

    def cpu_s(self) -> float:
        """Seconds of processor time so far, of all its threads."""
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        count = descriptors(self.process.pid)
        assert count is not None, "these tests need /proc"
        return count

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", self.process.port), PATIENCE_S)

    async def exchange(self, data: bytes, *, half_close: bool = False, timeout_s: float = PATIENCE_S) -> bytes:
        """Send bytes, and read until the process closes; what came so far where it does not."""
        reader, writer = await self.open()
        received = bytearray()
        try:
            writer.write(data)
            if half_close:
                writer.write_eof()
            async with asyncio.timeout(timeout_s):
                while chunk := await reader.read(1 << 16):
                    received += chunk
        except (ConnectionError, TimeoutError):
            pass
        finally:
            writer.transport.abort()
        return bytes(received)

    async def send_large(self, path: str, head: bytes, piece: bytes, tail: bytes, size: int) -> bytes:
        """The answer to a body of this size, made and sent piece by piece; asyncio's own buffer would be slow."""
        count = size // len(piece)
        reader, writer = await self.open()
        length = len(head) + len(piece) * count + len(tail)
        writer.write(f"POST {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}\r\n".encode())
        writer.write(PLAIN_HEAD + b"\r\n" + head)
        many = 1 + (1 << 18) // len(piece)
        while count > 0:
            writer.write(piece * min(many, count))
            count -= many
            await writer.drain()
        writer.write(tail)
        answer = await asyncio.wait_for(reader.read(), 10 * PATIENCE_S)
        writer.close()
        return answer

    @contextmanager
    def watched(self) -> Iterator[list[float]]:
        """Ask for the status all the time, from a thread; yields the seconds that each took, infinite without answer.

        On a machine that is busy with something else only what the process computed meanwhile counts.
        """
        took: list[float] = []
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                started, computed = time.monotonic(), self.cpu_s()
                answered = self.process.poll_ready(PATIENCE_S)
                spent = min(time.monotonic() - started, self.cpu_s() - computed)
                took.append(spent if answered else math.inf)
                over.wait(0.05)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield took
        finally:
            over.set()
            thread.join(2 * PATIENCE_S)
        assert not thread.is_alive(), "a status call goes on and on"

    @asynccontextmanager
    async def storm(self, slack_bytes: int | None = None, *, kept: int = 2) -> AsyncIterator[None]:
        """Whatever happens in here: statuses come all the while, and afterwards the process is as it was before.

        With `slack_bytes` it has also given its memory back, but for so much. It may have so many descriptors more.
        """
        async with Client.of(self.process) as client:
            await client.complete(GREETING)
        descriptors, rss = self.descriptors(), self.rss_bytes()
        written = len(self.process.output.text)
        with self.watched() as took:
            yield
        assert took, "no status was asked for"
        assert max(took) < HOST_DEADLINE_S
        async with Client.of(self.process) as client:
            answer = await asyncio.wait_for(client.complete(GREETING), PATIENCE_S)
            assert answer.text == ANSWER
        async with asyncio.timeout(PATIENCE_S):
            while self.descriptors() > descriptors + kept:
                await asyncio.sleep(0.05)
        self.check_output(self.process.output.text[written:])
        limit = time.monotonic() + RETURN_S
        while slack_bytes is not None and self.rss_bytes() - rss >= slack_bytes:
            assert time.monotonic() < limit, f"{(self.rss_bytes() - rss) >> 20} MiB more than before"
            await asyncio.sleep(0.1)

    def check_output(self, text: str) -> None:
        """Nothing that a host would take for an error, nothing unprintable, no line too long, no traceback."""
        assert self.process.output.captured == ""
        assert "Traceback" not in text
        for line in text.splitlines():
            assert capture(line) is None
            assert line.isprintable()
            assert len(line.encode()) < LINE_LIMIT_BYTES


def status_of(answer: bytes) -> int:
    """Of the first answer in what a connection received; 0 where there is none."""
    head = answer.split(b"\r\n", 1)[0].split()
    return int(head[1]) if len(head) > 1 and head[0].startswith(b"HTTP/1.") else 0
