"""A proxy in front of a runner that breaks one thing, so that the suite can be seen to notice it."""

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


def _replied(path: str, status: int, body: bytes) -> tuple[int, bytes]:
    return status, body


@dataclass(frozen=True)
class Breakage:
    """The changes that a proxy makes to what passes through it. Without arguments it makes none."""

    request: Callable[[Body], Body | None] = lambda body: body
    """Edits a request; None refuses it with `400 Bad Request`."""
    line: Callable[[Body], Iterable[Body]] = lambda answer: [answer]
    """Edits a line of a stream: none, one or more."""
    reply: Callable[[str, int, bytes], tuple[int, bytes]] = _replied
    """Edits path, status and body of every other answer."""


class Proxy:
    """Listens on a port of its own for as long as the block lasts, and passes everything on to `port`."""

    def __init__(self, port: int, breakage: Breakage) -> None:
        self.port = 0
        self._upstream = f"http://127.0.0.1:{port}"
        self._breakage = breakage

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
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        completes = request.method == "POST" and "completion" in request.path
        if not completes:
            return await self._pass(request, body)
        edited = self._edit(body)
        if edited is None:
            return web.Response(status=400, text="Bad Request\n")
        return await self._pass(request, edited)

    def _edit(self, body: bytes) -> bytes | None:
        try:
            decoded = json.loads(body)
        except (ValueError, RecursionError):
            return body
        edited = self._breakage.request(decoded) if isinstance(decoded, dict) else decoded
        return None if edited is None else json.dumps(edited).encode()

    async def _pass(self, request: web.Request, body: bytes) -> web.StreamResponse:
        headers = {"Content-Type": request.headers.get("Content-Type", "text/plain")}
        target = self._upstream + request.raw_path
        async with self._session.request(request.method, target, data=body, headers=headers) as upstream:
            if upstream.content_type == "application/jsonl":
                return await self._stream(request, upstream)
            status, text = self._breakage.reply(request.path, upstream.status, await upstream.read())
            kept = {name: upstream.headers[name] for name in ("Content-Type", "Allow") if name in upstream.headers}
            return web.Response(status=status, body=text, headers=kept)

    async def _stream(self, request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        await response.prepare(request)
        with suppress(ConnectionResetError):  # the client has gone
            async for line in self._lines(upstream):
                await response.write(line)
            await response.write_eof()
        return response

    async def _lines(self, upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        async for line in upstream.content:
            for edited in self._breakage.line(json.loads(line)):
                yield json.dumps(edited, ensure_ascii=False).encode() + b"\n"


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
