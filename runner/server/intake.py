"""Incoming requests: the reading of their bodies, the threads that check them, and the decoding of their media."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from threading import Event
from time import perf_counter
from typing import NamedTuple, Self, TypeVar, TypeVarTuple, cast

from aiohttp import web

from protocol import BadRequestError
from runner.engine.ports import Steps, Vision
from runner.engine.request import ShownPrompt
from runner.errors import RequestError
from runner.tokenizer import PART_CHARACTERS

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
MOST_TOGETHER_BYTES = 512 << 20
_PIECE_BYTES = 1 << 13
_TURN_S = 0.005
_STALLED_S = 60.0
_SHORT_THREADS = 2
_AT_ONCE_BYTES = 512
"""Waking a thread takes longer than checking a body of this size."""


class Intake:
    """All incoming requests: the memory that they hold, with the files of running ones, and the threads that check
    them. Owner: the event loop.

    A body may take half of the memory that the others leave free, so that large bodies never keep small ones out. Long
    texts and pictures have threads of their own, so that they never delay a short text.
    """

    def __init__(self, most_bytes: int = MOST_TOGETHER_BYTES) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        """The bytes that all requests hold at present."""
        self.decoding = asyncio.Lock()
        """Held while a piece of a body is decoded."""
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "tokenize")
        self._long = ThreadPoolExecutor(1, "tokenize-long")  # long texts take turns, part by part
        self._pictures = ThreadPoolExecutor(1, "headers")

    async def run(
        self, size: int, call: Callable[[*Arguments], Result], *args: *Arguments, shows: bool = False
    ) -> Result:
        """Runs `call` on a thread for texts of `size` characters or, with `shows`, for prompts with pictures. A call
        that is cancelled before its turn never runs."""
        threads = self._pictures if shows else self._short if size <= PART_CHARACTERS else self._long
        return await asyncio.wrap_future(threads.submit(call, *args))

    async def close(self, _: object) -> None:
        """Ends the threads, with the server."""
        for threads in (self._short, self._long, self._pictures):
            threads.shutdown(wait=False)


class Incoming:
    """One request, as a context. At the end of the context decoding ends, rows that the engine has not taken are
    dropped, and the request holds no memory."""

    def __init__(self, intake: Intake, vision: Vision) -> None:
        self.chunks: list[bytes] = []
        """The body, if `read_all` has read it."""
        self.size = 0
        """The bytes of `chunks`."""
        self._intake = intake
        self._vision = vision
        self._held_bytes = 0
        self._prompts: list[ShownPrompt] = []
        self._left = Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for prompt in self._prompts:
            self._vision.drop(prompt)
        self.hold(0)

    def has_left(self) -> bool:
        """Returns True after the end of the context. Any thread may call this."""
        return self._left.is_set()

    async def read_all(self, http: web.Request, most_bytes: int, held: int = 1) -> None:
        """Reads the body into `chunks`. Each byte counts as `held` bytes. Raises as `read_body` does."""

        def take(piece: bytes) -> int:
            self.chunks.append(piece)
            self.size += len(piece)
            return self.size * held

        await self.read_body(http, most_bytes, take)

    async def read_body(self, http: web.Request, most_bytes: int, take: Callable[[bytes], int]) -> None:
        """Passes the body in pieces to `take`, which returns the bytes that it holds.

        Raises:
            BadRequestError: the body is compressed, as no host's is: a megabyte may stand for a gigabyte.
            RequestError: the body has more than `most_bytes`, by its header or by count; nothing arrives for a minute;
                or there is no room for it beside the other bodies.
        """
        if http.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise BadRequestError("the body has a Content-Encoding, which is not supported: send it uncompressed")
        _refuse_large(http.content_length or 0, most_bytes)
        size = 0
        while chunk := await _next_chunk(http):
            size += len(chunk)
            _refuse_large(size, most_bytes)
            async with self._intake.decoding:
                await self._give(chunk, take)

    async def _give(self, chunk: bytes, take: Callable[[bytes], int]) -> None:
        until = perf_counter() + _TURN_S
        for start in range(0, len(chunk), _PIECE_BYTES):
            if perf_counter() > until:
                await asyncio.sleep(0)  # lets everything else run
                until = perf_counter() + _TURN_S
            self.hold(take(chunk[start : start + _PIECE_BYTES]))

    def hold(self, size: int) -> None:
        """Sets the bytes that the request holds. Raises RequestError if all requests leave less than `size` free."""
        intake = self._intake
        intake.held_bytes += size - self._held_bytes
        self._held_bytes = size
        if size > intake.most_bytes - intake.held_bytes:
            raise RequestError(
                f"other requests and their pictures fill the limit of {intake.most_bytes >> 20} MiB: send this one"
                " again in a moment, or make it shorter",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )

    async def check(self, size: int, steps: Steps[Result], *, shows: bool = False, at_once: bool = False) -> Result:
        """Returns the result of the steps, and decodes the media that they yield. `size` and `shows` choose the thread,
        as in `Intake.run`; with `at_once` the steps run here. Raises RequestError and BadRequestError."""
        while True:
            step = _next(steps) if at_once else await self._intake.run(size, _next, steps, shows=shows)
            if isinstance(step, _End):
                return cast("Result", step.result)
            await self.decode(step)

    async def check_body(self, steps: Steps[Result]) -> Result:
        """Returns the result of the steps that check the whole body."""
        return await self.check(self.size, steps, at_once=self.size <= _AT_ONCE_BYTES)

    async def decode(self, prompt: ShownPrompt | None) -> None:
        """Decodes those media of a prompt that were never decoded. Raises MediaError if one is damaged."""
        if prompt is None:
            return
        self._prompts.append(prompt)
        for decoding in self._vision.decode(prompt, self.has_left):
            await asyncio.wrap_future(decoding)


class _End(NamedTuple):
    result: object


def _next(steps: Steps[object]) -> ShownPrompt | _End | None:
    try:
        return next(steps)
    except StopIteration as end:  # which no future can raise
        return _End(end.value)


async def _next_chunk(http: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_STALLED_S):
            return await http.content.readany()
    except TimeoutError:
        raise RequestError(
            f"the request has stalled: no data arrived for {_STALLED_S:.0f} seconds", HTTPStatus.REQUEST_TIMEOUT
        ) from None


def _refuse_large(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise RequestError(
            f"the request has {size} bytes or more; the limit is {most_bytes}: shorten its prompt or its media",
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )
