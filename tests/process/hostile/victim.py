"""A running process to be attacked, and the checks that it must pass afterwards."""

import asyncio
import math
import string
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from scripts.tools.host.lib import Client, F, Process, Request, capture, descriptors, rss_bytes
from scripts.tools.models.scripted import BYTES, Transition, write_scripted
from tests.process.conftest import processor_s

MODEL = "victim:latest"
CONTEXT = 65536
GREETING = Request("Hi")
ANSWER = string.ascii_lowercase[9:]
"""The model's answer to it."""
LINE_LIMIT_BYTES = 4096
"""The limit of a log line: early hosts stop reading at 64 KiB, and a pipe takes this much in one piece."""
PATIENCE_S = 60.0
RETURN_S = 60.0
"""The time within which memory must be given back."""
HOST = replace(F, request_timeout_s=300.0)
"""A host with a deadline for requests; real ones wait for ever."""
HOST_DEADLINE_S = 10.0
"""A host that waits longer for a status kills the runner."""
PLAIN_HEAD = b"Host: 127.0.0.1\r\n"
_END = len(BYTES)


def write_victim(directory: Path) -> Path:
    """Writes a model that continues letters up to `z` and digits without end, and samples from W to Z after each of
    these."""
    chains = [*pairwise(string.ascii_lowercase), *zip(string.digits, string.digits[1:] + "0", strict=True)]
    rows: dict[int, Transition] = {ord(before): ord(after) for before, after in chains}
    rows |= dict.fromkeys(map(ord, "WXYZ"), dict.fromkeys(map(ord, "WXYZ"), 0.0))
    special = {_END: "<|end|>"}
    return write_scripted(directory, BYTES, rows, [_END], special, context_length=CONTEXT, small_head=True)


def post(path: str, body: bytes, head: bytes = b"") -> bytes:
    """Returns the bytes of a request that closes its connection."""
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
        return processor_s(self.process.pid)

    def descriptors(self) -> int:
        count = descriptors(self.process.pid)
        assert count is not None, "these tests need /proc"
        return count

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", self.process.port), PATIENCE_S)

    async def exchange(self, data: bytes, *, half_close: bool = False, timeout_s: float = PATIENCE_S) -> bytes:
        """Sends bytes and reads until the process closes the connection or the time is over; returns what came."""
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
        """Returns the answer to a body of this size, sent piece by piece; asyncio's own buffer would be slow."""
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
        """Polls the status from a thread and yields the seconds that each poll took, infinity without an answer.

        Counts at most the process's own processor time, because the machine may be busy with something else.
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
        assert not thread.is_alive(), "a status call never ended"

    @asynccontextmanager
    async def storm(self, slack_bytes: int | None = None, *, kept: int = 2) -> AsyncIterator[list[float]]:
        """Checks that statuses are answered during the block and that the process is as before after it.

        Yields the list of `watched`, which grows. With `slack_bytes` it must also have given back all memory but this;
        it may have `kept` more descriptors.
        """
        async with Client.of(self.process) as client:
            await client.complete(GREETING)
        descriptors, rss = self.descriptors(), self.rss_bytes()
        written = len(self.process.output.text)
        with self.watched() as took:
            yield took
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
        """Checks that no line is an error to a host, unprintable, too long or part of a traceback."""
        assert self.process.output.captured == ""
        assert "Traceback" not in text
        for line in text.splitlines():
            assert capture(line) is None
            assert line.isprintable()
            assert len(line.encode()) < LINE_LIMIT_BYTES


def status_of(answer: bytes) -> int:
    """Returns the HTTP status of the first answer in received bytes; 0 if there is none."""
    head = answer.split(b"\r\n", 1)[0].split()
    return int(head[1]) if len(head) > 1 and head[0].startswith(b"HTTP/1.") else 0
