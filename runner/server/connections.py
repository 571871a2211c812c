"""The connections: how many there may be at once, how long each may keep one waiting, and which one goes first."""

import asyncio
import socket
from functools import partial

from aiohttp import web

from runner.logs import Log
from runner.process.limits import free_descriptors

log = Log(__name__)
HEAD_S = 30.0
"""From the first byte of a request's head to its last."""
UNREAD_S = 60.0
"""How long a client may read nothing of what waits for it, beyond what sockets hold."""
KEEP_ALIVE_S = 600.0
"""Hosts keep idle connections for 90 s; ours must not be the side that closes first."""
_MOST = 1024
_AT_ONCE = 8  # accepted in one turn of the event loop, before the next one can close others
_SPARE = 3 * _AT_ONCE  # descriptors for these while those close, for statuses while all are busy, and for files
_BACKLOG = 128
_BUFFER_BYTES = 1 << 16


class Connections:
    """All connections, and whose turn it is to go when there is no room. Owner: the event loop.

    A connection is busy from the end of a request's head to the end of its answer, and idle otherwise. Beyond `most`
    connections the one goes that has been idle for longest; a status finds room even while so many are busy.
    """

    def __init__(self, most: int = _MOST) -> None:
        self.most = most
        self._idle: dict[web.RequestHandler, Connection] = {}  # the longest idle first
        self._busy: dict[web.RequestHandler, Connection] = {}

    @property
    def is_crowded(self) -> bool:
        """Whether so many are busy that nobody else can be."""
        return len(self._busy) > self.most

    async def serve(self, server: web.Server, listener: socket.socket) -> asyncio.Server:
        """Take connections, as many as there are descriptors for. OSError if somebody else listens there."""
        self.most = max(1, min(self.most, free_descriptors() - _SPARE))
        settings = {"keepalive_timeout": KEEP_ALIVE_S, "access_log": None, "read_bufsize": _BUFFER_BYTES}
        make = partial(Connection, self, server, auto_decompress=False, **settings)
        serving = await asyncio.get_running_loop().create_server(make, sock=listener, backlog=_AT_ONCE)
        listener.listen(_BACKLOG)
        return serving

    def begin(self, protocol: web.RequestHandler) -> None:
        """A request has come over this connection."""
        if connection := self._idle.pop(protocol, None):
            connection.end_head()
            self._busy[protocol] = connection

    def end(self, protocol: web.RequestHandler) -> None:
        """It has been answered."""
        if connection := self._busy.pop(protocol, None):
            self._idle[protocol] = connection

    def add(self, connection: "Connection") -> None:
        """A new one; if it is one too many, the longest idle goes."""
        self._idle[connection] = connection
        if len(self._idle) + len(self._busy) > self.most and len(self._idle) > 1:
            self._idle.pop(next(iter(self._idle))).abort()

    def is_idle(self, connection: "Connection") -> bool:
        """Whether it waits for a request."""
        return connection in self._idle

    def remove(self, connection: "Connection") -> None:
        """It is closed."""
        self._idle.pop(connection, None)
        self._busy.pop(connection, None)


class Connection(web.RequestHandler):
    """aiohttp's, with a limit of time for heads and for clients that do not read."""

    __slots__ = ("_connections", "_head", "_read_bytes", "_unread", "written_bytes")

    def __init__(self, connections: Connections, server: web.Server, **settings: object) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **settings)  # type: ignore[arg-type]  # by name
        self._connections = connections
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._read_bytes = 0
        self.written_bytes = 0
        """By whoever writes without waiting for the client to read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.remove(self)
        self.end_head()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data and self._head is None and self._connections.is_idle(self):
            self._head = self._loop.call_later(HEAD_S, self.abort)
        super().data_received(data)

    def end_head(self) -> None:
        """It is there, or will never be."""
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def abort(self) -> None:
        """Close it at once; what waits in it is dropped."""
        if self.transport is not None:
            self.transport.abort()

    def _watch(self) -> None:
        assert self.transport is not None
        self._read_bytes = self.written_bytes - self.transport.get_write_buffer_size()
        self._unread = self._loop.call_later(UNREAD_S, self._look)

    def _look(self) -> None:
        """Nobody has read all; whoever has read a part of it may go on."""
        if self.transport is None:
            return
        if self.written_bytes - self.transport.get_write_buffer_size() > self._read_bytes:
            self._watch()
            return
        log.warning("a client does not read its answer: closed", seconds=UNREAD_S)
        self.abort()

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
