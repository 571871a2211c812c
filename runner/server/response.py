"""The body of a response, written where its events arrive: no task wakes for a line."""

import asyncio
from collections.abc import Sequence

from aiohttp import web

from protocol import content_lines, error_line, final_line
from runner.engine.events import Event, Failed, Finished, Refused, Scored, Started, Text
from runner.server.connections import Connection

_ENDS = (Finished, Failed)


class ResponseBody:
    """Writes the events of one request, as one chunk for all events that arrive together.

    Owner: the event loop. Lines that the client has not read wait as bytes in the transport: at most the whole answer,
    which the context bounds. So a slow client delays nobody, and its request leaves the engine.
    """

    def __init__(self, protocol: web.RequestHandler, *, chunked: bool) -> None:
        """The head of the response has been written; `chunked` if it announces a chunked body."""
        self.rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """The last lines, which the caller writes; or the error that ended the response. Nothing is written once it is
        cancelled."""
        self._protocol = protocol
        self._chunked = chunked

    def take(self, events: Sequence[Event]) -> None:
        """Writes the lines of these events, at least one, unless they are the last ones."""
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
        case Started() | Refused() | Scored():
            return []
