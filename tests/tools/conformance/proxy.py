"""A proxy in front of a runner that breaks one thing, so that the suite can be seen to notice it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp import web

from scripts.tools.conformance.runners import Runners, Target
from scripts.tools.host.lib import Generation, Process

Body = dict[str, Any]
"""A decoded request or line: whatever JSON can say."""

_LONG_PROMPT = 1000
_CLOSE_S = 30.0
"""The time that a request whose client has disconnected may take to end."""


def _replied(path: str, status: int, body: bytes) -> tuple[int, bytes]:
    return status, body


@dataclass(frozen=True)
class Breakage:
    """The changes that a proxy makes to what passes through it. Without arguments it makes none."""

    request: Callable[[Body], Body | None] = lambda body: body
    """Edits a request; None refuses it with `400 Bad Request`."""
    raw: Callable[[bytes], bool] = lambda body: True
    """Returns True to let a raw body through; otherwise it is refused with 413."""
    line: Callable[[Body], Iterable[Body]] = lambda answer: [answer]
    """Edits a line of a stream: none, one or more."""
    reply: Callable[[str, int, bytes], tuple[int, bytes]] = _replied
    """Edits path, status and body of every other answer."""
    kind: str = "application/jsonl"
    """The content type of streams."""
    whole: bool = False
    """Holds the lines of a stream back until its end."""
    busy_s: float = 0.0
    """Seconds for which everything else waits while a completion runs."""
    alone: bool = False
    """Answers 503 to a completion while another one runs."""
    closes: bool = False
    """Closes the connection after each answer."""
    deaf: bool = False
    """Lets a completion with a long prompt go on when its client has gone."""


class Proxy:
    """Listens on a port of its own for as long as the block lasts, and passes everything on to `port`."""

    def __init__(self, port: int, breakage: Breakage) -> None:
        self.port = 0
        self._upstream = f"http://127.0.0.1:{port}"
        self._breakage = breakage
        self._running = 0
        self._left: set[asyncio.Task[bytes]] = set()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(), connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 22
        )
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._left:
            _, running = await asyncio.wait(self._left, timeout=_CLOSE_S)
            for task in running:
                task.cancel()
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        response = await self._answer(request)
        if self._breakage.closes:
            response.force_close()
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if not self._breakage.raw(body):
            return web.Response(status=413)
        completes = request.method == "POST" and "completion" in request.path
        if (self._running and not completes) or (self._running and self._breakage.busy_s):
            await asyncio.sleep(self._breakage.busy_s)
        if not completes:
            return await self._pass(request, body)
        if self._running and self._breakage.alone:
            return web.Response(status=503, text="busy")
        edited = self._edit(body)
        if edited is None:
            return web.Response(status=400, text="Bad Request\n")
        self._running += 1
        try:
            return await self._pass(request, edited)
        finally:
            self._running -= 1

    def _edit(self, body: bytes) -> bytes | None:
        try:
            decoded = json.loads(body)
        except (ValueError, RecursionError):
            return body
        edited = self._breakage.request(decoded) if isinstance(decoded, dict) else decoded
        return None if edited is None else json.dumps(edited).encode()

    async def _pass(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if self._breakage.deaf and len(body) > _LONG_PROMPT:
            return await self._pass_regardless(request, body)
        headers = {"Content-Type": request.headers.get("Content-Type", "text/plain")}
        target = self._upstream + request.raw_path
        async with self._session.request(request.method, target, data=body, headers=headers) as upstream:
            if upstream.content_type == "application/jsonl":
                return await self._stream(request, upstream)
            status, text = self._breakage.reply(request.path, upstream.status, await upstream.read())
            kept = {name: upstream.headers[name] for name in ("Content-Type", "Allow") if name in upstream.headers}
            return web.Response(status=status, body=text, headers=kept)

    async def _stream(self, request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": self._breakage.kind})
        await response.prepare(request)
        held = b""
        with suppress(ConnectionResetError):  # the client has gone
            async for line in self._lines(upstream):
                if self._breakage.whole:
                    held += line
                else:
                    await response.write(line)
            await response.write(held)
            await response.write_eof()
        return response

    async def _lines(self, upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        async for line in upstream.content:
            for edited in self._breakage.line(json.loads(line)):
                yield json.dumps(edited, ensure_ascii=False).encode() + b"\n"

    async def _pass_regardless(self, request: web.Request, body: bytes) -> web.Response:
        async def read() -> bytes:
            async with self._session.post(self._upstream + request.path, data=body) as upstream:
                return await upstream.read()

        task = asyncio.create_task(read())
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        return web.Response(body=await asyncio.shield(task), content_type="application/jsonl")


class Behind(Target):
    """A target whose clients meet a proxy in front of the processes."""

    def __init__(self, runners: Runners, generation: Generation, breakage: Breakage) -> None:
        super().__init__(runners, generation)
        self._breakage = breakage
        self._proxies: dict[int, Proxy] = {}

    async def front(self, process: Process) -> int:
        if process.port not in self._proxies:
            proxy = Proxy(process.port, self._breakage)
            self._proxies[process.port] = await self._open.enter_async_context(proxy)
        return self._proxies[process.port].port
