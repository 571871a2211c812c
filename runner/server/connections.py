"""The connections: the limit of their number, their time limits, and the order in which they are closed."""

import asyncio
import socket
from functools import partial

from aiohttp import web

from runner.logs import Log
from runner.process.limits import free_descriptors

log = Log(__name__)
HEAD_S = 30.0
"""The time limit for the head of a request, from the first byte on."""
UNREAD_S = 60.0
"""The longest time for which a client may read nothing of the output that waits for it."""
KEEP_ALIVE_S = 600.0
"""The time for which idle connections stay open. Hosts close them after 90 s, and must be the first to close."""
_MOST = 1024
_AT_ONCE = 8  # the connections that one turn of the event loop accepts
_SPARE = 3 * _AT_ONCE  # descriptors for new and for closing connections, for /v1/status, and for files
_BACKLOG = 128
_BUFFER_BYTES = 1 << 16
_MOST_UNWANTED_BYTES = 256 << 20
"""The most bytes of a refused body that are received: some clients send a whole body before they read the response."""


class Connections:
    """All connections, idle and busy. Owner: the event loop.

    A connection is busy from the end of a request's head to the end of the response, and idle otherwise. Beyond `most`
    connections, the one idle longest is closed. `/v1/status` is answered even while `most` are busy.
    """

    def __init__(self, most: int = _MOST) -> None:
        self.most = most
        self._idle: dict[web.RequestHandler, Connection] = {}  # the one idle longest comes first
        self._busy: dict[web.RequestHandler, Connection] = {}

    @property
    def is_full(self) -> bool:
        """True if more than `most` connections are busy. Then only `/v1/status` is answered."""
        return len(self._busy) > self.most

    async def serve(self, server: web.Server, listener: socket.socket) -> asyncio.Server:
        """Starts to accept connections. Lowers `most` if few descriptors are free. Raises OSError if another process
        listens on the port."""
        self.most = max(1, min(self.most, free_descriptors() - _SPARE))
        settings = {"keepalive_timeout": KEEP_ALIVE_S, "access_log": None, "read_bufsize": _BUFFER_BYTES}
        make = partial(Connection, self, server, auto_decompress=False, **settings)
        serving = await asyncio.get_running_loop().create_server(make, sock=listener, backlog=_AT_ONCE)
        listener.listen(_BACKLOG)
        return serving

    def begin(self, protocol: web.RequestHandler) -> None:
        """Counts the connection as busy. Called when the head of a request has arrived."""
        if connection := self._idle.pop(protocol, None):
            connection.end_head()
            self._busy[protocol] = connection

    def end(self, protocol: web.RequestHandler) -> None:
        """Counts the connection as idle. Called when its request has been answered."""
        if connection := self._busy.pop(protocol, None):
            self._idle[protocol] = connection

    def add_idle(self, connection: "Connection") -> None:
        """Adds a new connection. If there are too many, closes the one that was idle for the longest time."""
        self._idle[connection] = connection
        if len(self._idle) + len(self._busy) > self.most and len(self._idle) > 1:
            self._idle.pop(next(iter(self._idle))).abort()

    def is_idle(self, connection: "Connection") -> bool:
        """Returns True if the connection waits for a request."""
        return connection in self._idle

    def remove(self, connection: "Connection") -> None:
        """Forgets a closed connection."""
        self._idle.pop(connection, None)
        self._busy.pop(connection, None)


class Connection(web.RequestHandler):
    """aiohttp's connection, with time limits for the head of a request and for a client that does not read."""

    __slots__ = ("_connections", "_head", "_read_bytes", "_unread", "_unwanted", "written_bytes")

    def __init__(self, connections: Connections, server: web.Server, **settings: object) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **settings)  # type: ignore[arg-type]  # by name
        self._connections = connections
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._unwanted: _Unwanted | None = None
        self._read_bytes = 0
        self.written_bytes = 0
        """The bytes written, counted by code that does not wait until the client has read them."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.add_idle(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.remove(self)
        self.end_head()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._unwanted is not None:
            self._unwanted.drop(len(data))
            return
        if data and self._head is None and self._connections.is_idle(self):
            self._head = self._loop.call_later(HEAD_S, self.abort)
        super().data_received(data)

    def end_head(self) -> None:
        """Stops the timer for the head of a request."""
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def refuse_rest(self, http: web.Request) -> None:
        """Drops the rest of a refused body without parsing it, and stops reading a very large one. The connection is
        closed at the end of the body, when the client closes it, or after some seconds."""
        assert self.transport is not None
        self._unwanted = _Unwanted(http, self.transport)
        self.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def abort(self) -> None:
        """Closes the connection immediately, and drops output that was not sent."""
        if self.transport is not None:
            self.transport.abort()

    def _watch(self) -> None:
        assert self.transport is not None
        self._read_bytes = self.written_bytes - self.transport.get_write_buffer_size()
        self._unread = self._loop.call_later(UNREAD_S, self._look)

    def _look(self) -> None:
        """Closes the connection if the client has read nothing since the last call."""
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


class _Unwanted:
    """Drops the rest of a refused body."""

    def __init__(self, http: web.Request, transport: asyncio.Transport) -> None:
        self._content = http.content
        self._transport = transport
        while http.content.exception() is None and http.content.read_nowait():
            pass  # the parser passes on the rest of its data when there is room for it
        length = http.content_length
        self._left = None if length is None else length - http.content.total_bytes
        self._most = _MOST_UNWANTED_BYTES

    def drop(self, size: int) -> None:
        """Counts `size` bytes that have arrived and are dropped. Ends the body, or stops reading, at the limit."""
        self._most -= size
        if self._left is not None:
            self._left -= size
            if self._left <= 0 and not self._content.is_eof():
                self._content.feed_eof()
        if self._most < 0:
            self._transport.pause_reading()
