"""Chat templates rendered in processes of their own: they come with models, from anywhere, and need not end."""

import asyncio
import contextlib
import json
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 5
"""Of a rendering; real templates take milliseconds."""
_LIMIT_BYTES = 1 << 30
_MOST_CHARACTERS = 16 << 20
_PROCESSES = 4
_LENGTH = struct.Struct(">Q")
_WORKER = Path(__file__).with_name("template_worker.py")


class RenderingError(Exception):
    """The template refuses the chat, is wrong, or goes too far. The text is for the user."""


class Renderer:
    """The processes, started when they are needed and kept for the next chat. Owner: the event loop."""

    def __init__(self, limit_s: int = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._idle: list[Process] = []
        self._places = asyncio.Semaphore(_PROCESSES)

    async def render(self, source: str, values: Mapping[str, object]) -> str:
        """Renders `values`, which are JSON, by the template `source`. Raises `RenderingError`.

        Whoever is cancelled ends the rendering, too.
        """
        job = json.dumps([source, values]).encode()
        async with self._places:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await _ask(process, job)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise RenderingError(self._reason(await _status(process))) from error
            except BaseException:
                await _end(process)
                raise
            self._idle.append(process)
        if "error" in answer:
            raise RenderingError(answer["error"])
        return answer["text"]

    async def close(self) -> None:
        """End the processes that are kept."""
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> Process:
        limits = [str(self._limit_s), str(_LIMIT_BYTES), str(_MOST_CHARACTERS)]
        return await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(_WORKER), *limits, stdin=PIPE, stdout=PIPE
        )

    def _reason(self, status: int) -> str:
        if status == -signal.SIGALRM:
            return f"the chat template did not end within {self._limit_s} s"
        return f"the process that rendered the chat template ended with status {status}"


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await _status(process)


async def _status(process: Process) -> int:
    """Of a process that ends of itself or was killed, once it has ended and its pipes are closed.

    One that ends of itself must not be killed as well: asyncio could lose its status.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    with contextlib.suppress(ConnectionError):
        await process.stdin.wait_closed()
    await process.stdout.read()
    return await process.wait()


async def _ask(process: Process, job: bytes) -> dict[str, str]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(job)))
    process.stdin.write(job)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    answer: dict[str, str] = json.loads(await process.stdout.readexactly(length))
    return answer
