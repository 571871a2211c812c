"""A hostile client beside the ordinary ones: large bodies, silent connections, endless heads, exploding formats."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random

from scripts.tools.soak.clients import Tally
from scripts.tools.soak.hostile_formats import FORMATS

_HEAD = b"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: "
_LARGE_BYTES = 25_000_000
_PIECE_BYTES = 1 << 18
_SILENT = 60
_SILENCE_S = 2.0
_PAUSE_S = 1.0
_LONGEST_WAIT_S = 120.0


class Intruder:
    """Attacks at random, one at a time; each counts in `Tally.attacks`, and must get the response it deserves."""

    def __init__(self, seed: int, port: int, tally: Tally) -> None:
        self._random = Random(f"{seed}/intruder")
        self._port = port
        self._tally = tally
        self._attacks: dict[str, Callable[[], Awaitable[None]]] = {
            "unused text": self._send_unused,
            "long prompt": self._send_prompt,
            "many values": self._send_values,
            "silence": self._be_silent,
            "endless head": self._never_end,
            "leaving": self._leave,
            "format": self._send_format,
            "abandoned format": self._abandon_format,
        }

    async def run(self, until: float) -> None:
        """Attacks until `time.monotonic()` has passed `until`."""
        while time.monotonic() < until:
            name = self._random.choice(list(self._attacks))
            try:
                async with asyncio.timeout(_LONGEST_WAIT_S):
                    await self._attacks[name]()
            except (OSError, TimeoutError) as error:
                self._tally.faults.append(f"{name}: {type(error).__name__}: {error}")
            self._tally.attacks[name] += 1
            await asyncio.sleep(_PAUSE_S)

    async def _send_unused(self) -> None:
        await self._send(b'{"Prompt":"x","Options":{"num_predict":1},"x":"', b"[,:{", b'"}', wanted=200)

    async def _send_prompt(self) -> None:
        await self._send(b'{"Prompt":"', b"\\u003c", b'"}', wanted=400)

    async def _send_values(self) -> None:
        await self._send(b'{"x":[', b'"",', b'""]}', wanted=400)

    async def _send(self, head: bytes, piece: bytes, tail: bytes, *, wanted: int) -> None:
        """Sends a large body, which may be answered before all of it has come."""
        count = _LARGE_BYTES // len(piece)
        length = len(head) + len(piece) * count + len(tail)
        async with self._connection() as (reader, writer):
            writer.write(_HEAD + b"%d\r\n\r\n" % length + head)
            with contextlib.suppress(ConnectionError):
                while count > 0 and not reader.at_eof():
                    writer.write(piece * min(_PIECE_BYTES // len(piece), count))
                    count -= _PIECE_BYTES // len(piece)
                    await writer.drain()
                writer.write(tail)
            status = (await reader.readline()).split()[1:2]
        if status != [b"%d" % wanted]:
            self._tally.faults.append(f"a large body got {status}, not {wanted}")

    async def _send_format(self) -> None:
        """Sends a hostile format, which must be answered or refused."""
        async with self._asking_format() as reader:
            status = (await reader.readline()).split()[1:2]
            await reader.read()
        if status not in ([b"200"], [b"400"]):
            self._tally.faults.append(f"a hostile format got {status}")

    async def _abandon_format(self) -> None:
        async with self._asking_format():
            await asyncio.sleep(self._random.random())

    @contextlib.asynccontextmanager
    async def _asking_format(self) -> AsyncIterator[asyncio.StreamReader]:
        wanted = FORMATS[self._random.choice(list(FORMATS))]
        body = json.dumps({"Prompt": "x", "Format": wanted, "Options": {"num_predict": 20}}).encode()
        async with self._connection() as (reader, writer):
            writer.write(_HEAD + b"%d\r\n\r\n" % len(body) + body)
            await writer.drain()
            yield reader

    async def _be_silent(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(_SILENT):
                await stack.enter_async_context(self._connection())
            await asyncio.sleep(_SILENCE_S)

    async def _never_end(self) -> None:
        async with self._connection() as (_, writer):
            writer.write(b"GET /v1/status HTTP/1.1\r\nX: ")
            for _ in range(10):
                writer.write(b"x")
                await asyncio.sleep(_SILENCE_S / 10)

    async def _leave(self) -> None:
        """Leaves in the middle of a body, before its announced length."""
        async with self._connection() as (_, writer):
            writer.write(_HEAD + b'100000\r\n\r\n{"Prompt":"' + b"x" * self._random.randrange(90_000))
            await asyncio.sleep(self._random.random() * 0.1)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
