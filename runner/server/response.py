"""The body of an answer, written from where its events arrive: no task is woken for a line."""

import asyncio
from collections.abc import Sequence

from aiohttp import web

from protocol import content_lines, error_line, final_line
from runner.engine.events import Event, Failed, Finished, Refused, Started, Text
from runner.server.connections import Connection

_ENDS = (Finished, Failed)


class ResponseBody:
    """Writes what the engine tells of one request, as one chunk for all that arrives together.

    Owner: the event loop. What the client does not read waits as bytes in the transport: at most the whole answer,
    which the context bounds, and for as long as the client reads any of it. So a slow client holds up nobody, and what
    it asked for leaves the engine.
    """

    def __init__(self, protocol: web.RequestHandler, *, chunked: bool) -> None:
        """The head of the response has been written; `chunked` is how it says that the body is framed."""
        self.rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """The last lines, which it does not write; or why there are none. Once it is cancelled nothing is written."""
        self._protocol = protocol
        self._chunked = chunked

    def take(self, events: Sequence[Event]) -> None:
        """Write the lines of these events, of which there are some, unless they are the last ones."""
        if self.rest.done():
            return
        try:
            lines = b"".join([line for event in events for line in _lines(event)])
            if isinstance(events[-1], _ENDS):
                self.rest.set_result(lines)
            elif lines:
                self._write(lines)
        except Exception as error:  # of this request alone
            self.rest.set_exception(error)

    def _write(self, lines: bytes) -> None:
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        data = b"%x\r\n%b\r\n" % (len(lines), lines) if self._chunked else lines
        if isinstance(self._protocol, Connection):
            self._protocol.written_bytes += len(data)
        transport.write(data)


def _lines(event: Event) -> list[bytes]:
    match event:
        case Text():
            return content_lines(event.text, event.logprobs, event.metrics)
        case Finished():
            return [final_line(event.reason, event.metrics)]
        case Failed():
            return [error_line(event.text)]
        case Started() | Refused():
            return []
