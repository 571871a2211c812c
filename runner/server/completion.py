"""`POST /completion`: a request, answered by a stream of lines."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from protocol import (
    CompletionReader,
    CompletionRequest,
    Format,
    MediaTooLargeError,
    PromptTooLongError,
    TooLargeError,
    content_lines,
    error_line,
    final_line,
)
from protocol.reader import MOST_MEDIA_BYTES, MOST_REST_BYTES
from runner.engine.engine import Engine
from runner.engine.events import Event, Failed, Finished, Refused, Scored, Started, Text
from runner.engine.request import Request
from runner.errors import RequestError
from runner.logs import printable
from runner.server.connections import Connection
from runner.server.intake import Incoming, Intake
from runner.server.prepare import most_prompt_bytes, out_of_range, prepare, refuse_size, with_format
from runner.server.remarks import Remarks

if TYPE_CHECKING:
    from runner.engine.answer_grammar import Grammar

_ENDS = (Finished, Failed)


class ResponseBody:
    """Writes the events of one request. Events that arrive together make one chunk; no task wakes for each line.

    Owner: the event loop. Lines that the client has not read yet wait in the transport, if need be the whole answer. So
    a slow client does not delay other clients, and its request can end in the engine.
    """

    def __init__(self, protocol: web.RequestHandler, *, chunked: bool) -> None:
        """Called after the head of the response was written. `chunked` is True if the head announces a chunked body."""
        self.rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """A future for the last lines, which the caller writes, or for the error that ended the response. After the
        caller has cancelled it, this object writes no more lines."""
        self._protocol = protocol
        self._chunked = chunked

    def write_events(self, events: Sequence[Event]) -> None:
        """Writes the lines of `events`, which must not be empty. The last lines of the response go into `rest`."""
        if self.rest.done():
            return
        try:
            lines = b"".join([line for event in events for line in _lines(event)])
            if isinstance(events[-1], _ENDS):
                self.rest.set_result(lines)
            elif lines:
                self._write(lines)
        except Exception as error:  # an error here ends only this request
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
            return [error_line(told(event.text))]
        case Started() | Refused() | Scored():
            return []


_MOST_TOLD_CHARACTERS = 2000


def told(text: str) -> str:
    """Returns the text of a refusal or of an error as one line of bounded length, without control characters: it may
    repeat a part of the client's request."""
    line = printable(text[:_MOST_TOLD_CHARACTERS])[:_MOST_TOLD_CHARACTERS]
    return f"{line}..." if len(text) > _MOST_TOLD_CHARACTERS else line


_SMALL_BYTES = 1 << 20
"""The size up to which a body is read before the length of the longest possible prompt is known."""
_ESCAPE_BYTES = 6
"""The most bytes in JSON for one byte of text."""
NUMBER = web.RequestKey("number", int)
"""The number by which the engine's log names the request; set once the request has one."""


class CompletionEndpoint:
    """Has requests prepared on other threads, submits them to the engine, and writes the engine's events to clients."""

    def __init__(self, engine: Engine, helper: Executor, intake: Intake) -> None:
        self._engine = engine
        self._helper = helper
        self._intake = intake
        self._remarks = Remarks()

    async def post(self, http: web.Request) -> web.StreamResponse:
        """Answers one completion request. The server cancels this call whenever the client disconnects."""
        self._engine.encoder_use.refuse_prompts()
        with Incoming(self._intake, self._engine.vision) as incoming:
            request = await self._request(http, incoming)
            http[NUMBER] = request.number
            await incoming.decode(request.shown)
            try:
                self._engine.submit(request)
                return await self._stream(http, request)
            finally:
                request.cancel()

    async def _request(self, http: web.Request, incoming: Incoming) -> Request:
        wire, wanted = await self._read(http, incoming)
        limits, size = self._engine.limits.within(wire.options.num_ctx), len(wire.prompt)
        steps = prepare(wire, self._engine.tokenizer, limits, wanted, self._engine.vision, incoming.has_left)
        request = await incoming.check(size, steps, shows=bool(wire.media))
        self._remarks.log_values(out_of_range(wire, request.sampling))
        incoming.hold(request.shown.nbytes if request.shown is not None else 0)  # files, until the answer ends
        return request

    async def _read(self, http: web.Request, incoming: Incoming) -> tuple[CompletionRequest, Format | None]:
        """Reads the request. Arriving bytes are read on the event loop, the rest of the work runs on another thread."""
        tokenizer, limits = self._engine.tokenizer, self._engine.limits
        run = asyncio.get_running_loop().run_in_executor
        most = _SMALL_BYTES
        if http.content_length is None or http.content_length > _SMALL_BYTES:
            most = await run(self._helper, most_prompt_bytes, tokenizer, limits.context_length)
        reader = CompletionReader(most, http.content_length or 0)
        try:
            await incoming.read_body(http, most * _ESCAPE_BYTES + MOST_REST_BYTES + MOST_MEDIA_BYTES, reader.feed)
            read = await run(self._helper, lambda: with_format(reader.finish(), self._engine.vision))
        except TooLargeError as error:
            raise RequestError(str(error)) from None
        except MediaTooLargeError as error:
            raise RequestError(str(error), HTTPStatus.REQUEST_ENTITY_TOO_LARGE) from None
        except PromptTooLongError as error:
            refuse_size(error.size, tokenizer, limits)
        self._remarks.log_unknown(reader.strangers)
        return read

    async def _stream(self, http: web.Request, request: Request) -> web.StreamResponse:
        events = await request.stream.batch()
        if isinstance(events[0], Refused):
            raise RequestError(events[0].text)
        if request.grammar is not None:
            self._engine.compile(request)
            await _done(request.grammar)  # so an invalid grammar is refused before the answer begins
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        if http.version >= (1, 1):
            response.enable_chunked_encoding()
        with suppress(ConnectionError):  # if the client has left, the server notices it at the end
            await response.prepare(http)  # only after the request has left the queue
            body = ResponseBody(http.protocol, chunked=response.chunked)
            body.write_events(events)
            request.stream.follow(body.write_events)
            await response.write_eof(await body.rest)
        return response


async def _done(compiling: "Future[Grammar]") -> None:
    """Waits until a grammar is compiled. Raises RequestError if the grammar is invalid."""
    waiting = asyncio.wrap_future(compiling)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved even without a client
    await asyncio.shield(waiting)
