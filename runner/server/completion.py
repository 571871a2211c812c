"""`POST /completion`: one request in, its stream of lines out."""

import asyncio
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web

from protocol import BadRequestError, decode_completion
from runner.engine.engine import Engine
from runner.engine.events import Refused
from runner.engine.request import Request, prepare
from runner.errors import RequestError
from runner.server.answer import Answer
from runner.server.bodies import read_body

if TYPE_CHECKING:
    from runner.grammar import Grammar

NUMBER = web.RequestKey("number", int)
"""What the engine's log lines call the request, once it has got as far."""


class CompletionEndpoint:
    """Prepares requests off the event loop, hands them to the engine, and writes what it tells."""

    def __init__(self, engine: Engine, helper: Executor) -> None:
        self._engine = engine
        self._helper = helper

    async def post(self, http: web.Request) -> web.StreamResponse:
        """Answer one completion; cancelled by the server when the client goes away, in every phase."""
        body = await read_body(http)
        try:
            request = await asyncio.get_running_loop().run_in_executor(self._helper, self._prepare, body)
        except BadRequestError:
            raise RequestError("Bad Request") from None
        http[NUMBER] = request.number
        self._engine.submit(request)
        try:
            if request.grammar is not None:
                await _done(request.grammar)  # one that is none is refused before the answer begins
            return await self._stream(http, request)
        finally:
            request.cancel()

    def _prepare(self, body: bytes) -> Request:
        return prepare(decode_completion(body), self._engine.tokenizer, self._engine.limits)

    async def _stream(self, http: web.Request, request: Request) -> web.StreamResponse:
        events = await request.stream.batch()
        if isinstance(events[0], Refused):
            raise RequestError(events[0].text)
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        if http.version >= (1, 1):
            response.enable_chunked_encoding()
        with suppress(ConnectionError):  # the client is gone; the server finds out too when it ends the response
            await response.prepare(http)  # only now has the request left the queue
            answer = Answer(http.transport, chunked=response.chunked)
            answer.take(events)
            request.stream.follow(answer.take)
            await response.write_eof(await answer.rest)
        return response


async def _done(compiling: "Future[Grammar]") -> None:
    """Waits for a grammar, which others may wait for too. RequestError if it is none."""
    waiting = asyncio.wrap_future(compiling)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # it was retrieved, whoever is gone
    await asyncio.shield(waiting)
