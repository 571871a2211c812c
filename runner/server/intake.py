"""Incoming requests: reads their bodies, has threads check them, and has their media decoded."""

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
"""The size of a body up to which checking it takes less time than waking a thread."""


class Intake:
    """Counts the memory of all incoming requests (and of the media files of running ones), and has the threads that
    check requests. Owner: the event loop.

    A request may hold at most half of the memory that other requests leave free, so that there is always room for a
    small one. Long texts and prompts with pictures have separate threads, so that they never delay a short text.
    """

    def __init__(self, most_bytes: int = MOST_TOGETHER_BYTES) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        """The bytes that all requests together hold now."""
        self.decoding = asyncio.Lock()
        """A lock that is held while a part of a body is decoded."""
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "tokenize")
        self._long = ThreadPoolExecutor(1, "tokenize-long")  # long texts take turns, part by part
        self._pictures = ThreadPoolExecutor(1, "headers")

    async def run(
        self, size: int, call: Callable[[*Arguments], Result], *args: *Arguments, shows: bool = False
    ) -> Result:
        """Runs `call` on a thread for texts of `size` characters or, with `shows`, on the one for prompts with
        pictures. A call that is cancelled while it waits never runs."""
        threads = self._pictures if shows else self._short if size <= PART_CHARACTERS else self._long
        return await asyncio.wrap_future(threads.submit(call, *args))

    async def close(self, _: object) -> None:
        """Ends the threads. Called when the server ends."""
        for threads in (self._short, self._long, self._pictures):
            threads.shutdown(wait=False)


class Incoming:
    """One request, as a context manager. At the end of the context, the decoding of media stops, rows that the engine
    has not taken are dropped, and the memory of the request counts as free."""

    def __init__(self, intake: Intake, vision: Vision) -> None:
        self.chunks: list[bytes] = []
        """The pieces of the body after `read_all`; else empty."""
        self.size = 0
        """The number of bytes in `chunks`."""
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
        """Reads the body into `chunks`. Each byte counts as `held` bytes. Raises the errors of `read_body`."""

        def take(piece: bytes) -> int:
            self.chunks.append(piece)
            self.size += len(piece)
            return self.size * held

        await self.read_body(http, most_bytes, take)

    async def read_body(self, http: web.Request, most_bytes: int, take: Callable[[bytes], int]) -> None:
        """Passes the body in pieces to `take`, which returns the number of bytes that it holds in memory.

        Raises:
            BadRequestError: the body is compressed, which no host does: a megabyte might expand to a gigabyte.
            RequestError: the body has more than `most_bytes`, by its header or by count; no data arrives for a minute;
                or other requests leave too little memory.
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
                await asyncio.sleep(0)  # lets other tasks run
                until = perf_counter() + _TURN_S
            self.hold(take(chunk[start : start + _PIECE_BYTES]))

    def hold(self, size: int) -> None:
        """Sets the number of bytes that the request holds. Raises RequestError if less than `size` is then free."""
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
        """Runs `steps`, decodes the media that they yield, and returns their result. `size` and `shows` choose the
        thread (`Intake.run`); `at_once` stands for the event loop. Raises RequestError and BadRequestError."""
        while True:
            step = _next(steps) if at_once else await self._intake.run(size, _next, steps, shows=shows)
            if isinstance(step, _End):
                return cast("Result", step.result)
            await self.decode(step)

    async def check_body(self, steps: Steps[Result]) -> Result:
        """Runs the steps that check the whole body, which `read_all` has read, and returns their result."""
        return await self.check(self.size, steps, at_once=self.size <= _AT_ONCE_BYTES)

    async def decode(self, prompt: ShownPrompt | None) -> None:
        """Waits until all media of a prompt are decoded. Raises MediaError if one of them is damaged."""
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
    except StopIteration as end:  # a future cannot raise StopIteration
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
