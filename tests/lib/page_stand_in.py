"""A runner without a model behind the real page: a test says what `/v1/stats`, `/v1/cache` and `/v1/events` tell."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

import msgspec
from aiohttp import web

from protocol.stats import CacheNode, CachePicture, Stats
from runner.numbers.endpoints import PAGE

STATS = Stats(
    version="0.1.0", model="demo:latest", architecture="LlamaForCausalLM", device="cpu", context_length=4096,
    parallel=4, cache_kind="trie", uptime_s=1.0,
)  # fmt: skip
MEGABYTE = 1_000_000
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def node(
    id: int,  # noqa: A002 - the field's name
    parent: int | None,
    start: int,
    end: int,
    *,
    live: bool = False,
    idle: int = 0,
    **more: object,
) -> CacheNode:
    """An edge of a model of 12 layers, of which all are live or all paged out; 1000 bytes a token."""
    size, layers = 1000 * (end - start), 12
    return CacheNode(
        id=id, parent=parent, start=start, end=end, bytes=size, live_bytes=size if live else 0,
        paged_bytes=0 if live else size, layers=layers, live_layers=layers if live else 0,
        paged_layers=0 if live else layers, idle_uses=idle, **{"locks": 0, **more},  # type: ignore[arg-type]
    )  # fmt: skip


class StandIn:
    """Serves on one port; can end and come back there, as runners do."""

    def __init__(self) -> None:
        self.stats = STATS
        self.picture = CachePicture(generation=0, kind="trie")
        self.silent = False
        """True if new listeners get no event until there is news."""
        self.asked: list[str] = []
        """The paths of all requests."""
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._listeners: set[asyncio.Queue[bytes]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    @property
    def port(self) -> int:
        return self._port

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def begin(self) -> None:
        """Listen: on a free port the first time, on the same one after that."""

        @web.middleware
        async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.asked.append(request.path)
            return await handler(request)

        app = web.Application(middlewares=[noted])
        app.add_routes([*PAGE, web.get("/v1/stats", self._stats), web.get("/v1/events", self._events)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()

    async def end(self) -> None:
        """Close every connection and listen no more."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def tell(self, stats: Stats) -> None:
        """The event that is sent to all listeners, and first to new ones."""
        self.stats = stats
        self._send(_event("stats", stats))

    def show(self, *nodes: CacheNode, kind: str = "trie") -> None:
        """Another state of the trie."""
        self.picture = CachePicture(generation=self.picture.generation + 1, kind=kind, nodes=list(nodes))
        self._send(_event("cache", self.picture))

    def _send(self, event: bytes) -> None:
        for listener in self._listeners:
            listener.put_nowait(event)

    async def _stats(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.stats), content_type="application/json")

    async def _events(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(http)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            known = b"" if self.silent else _event("stats", self.stats) + _event("cache", self.picture)
            await response.write(b": hello\n\n" + known)
            while True:
                await response.write(await queue.get())
        finally:
            self._listeners.discard(queue)
            with suppress(ConnectionError):
                await response.write_eof()


def _event(name: str, data: Stats | CachePicture) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
