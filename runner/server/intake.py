"""Requests that come in: their bodies, read in pieces and refused as soon as they cannot be served, the threads that
check them, and the media that are decoded before they can go on."""

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
"""To wake a thread takes longer than to check a body that has no more."""


class Intake:
    """All requests that come in: the bytes that they hold in memory, with the pictures of running ones, and the threads
    that check them. Owner: the event loop.

    A body may take as much as all bodies together leave free, so that large ones never keep small ones out. The threads
    do nothing else, so that no long text and no picture delays a short text.
    """

    def __init__(self, most_bytes: int = MOST_TOGETHER_BYTES) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        """The bytes of all bodies at present."""
        self.decoding = asyncio.Lock()
        """Held while a piece is decoded: of several bodies that arrive at once, one is decoded at a time."""
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "tokenize")
        self._long = ThreadPoolExecutor(1, "tokenize-long")  # their parts take turns
        self._pictures = ThreadPoolExecutor(1, "headers")

    async def run(
        self, size: int, call: Callable[[*Arguments], Result], *args: *Arguments, shows: bool = False
    ) -> Result:
        """Runs `call` on a thread for texts of `size` characters or, with `shows`, for prompts with pictures. If
        cancelled before its turn, it never runs."""
        threads = self._pictures if shows else self._short if size <= PART_CHARACTERS else self._long
        return await asyncio.wrap_future(threads.submit(call, *args))

    async def close(self, _: object) -> None:
        """Ends the threads, with the server."""
        for threads in (self._short, self._long, self._pictures):
            threads.shutdown(wait=False)


class Incoming:
    """One request, as a context. At its end decoding ends, rows that the engine has not taken are dropped, and the
    request holds nothing."""

    def __init__(self, intake: Intake, vision: Vision) -> None:
        self.chunks: list[bytes] = []
        """The body as it arrived, if `read_all` has read it."""
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
        """Returns True once the block has ended. Any thread may call this."""
        return self._left.is_set()

    @property
    def size(self) -> int:
        """The bytes of the body."""
        return sum(map(len, self.chunks))

    async def read_all(self, http: web.Request, most_bytes: int, held: int = 1) -> None:
        """Reads the body as it is. Each byte counts as `held` bytes. Raises as `read_body` does."""
        size = 0

        def take(piece: bytes) -> int:
            nonlocal size
            self.chunks.append(piece)
            size += len(piece)
            return size * held

        await self.read_body(http, most_bytes, take)

    async def read_body(self, http: web.Request, most_bytes: int, take: Callable[[bytes], int]) -> None:
        """Passes the body to `take` in pieces; `take` returns how many bytes it holds by then.

        Raises:
            BadRequestError: the body is compressed, which no host does: a megabyte may stand for a gigabyte.
            RequestError: it has more than `most_bytes`, by its header or by count; nothing arrives for a minute; or
                there is no room for it beside the other bodies.
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
        """Sets the bytes that the request holds. Raises RequestError if all together leave less than that free."""
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
        """Returns the result of the steps, which run on the threads for such a text, or here `at_once`. Decodes the
        media that they yield. Raises RequestError and BadRequestError."""
        while True:
            step = _next(steps) if at_once else await self._intake.run(size, _next, steps, shows=shows)
            if isinstance(step, _End):
                return cast("Result", step.result)
            await self.decode(step)

    async def check_body(self, steps: Steps[Result]) -> Result:
        """Returns the result of the steps that check the whole body."""
        return await self.check(self.size, steps, at_once=self.size <= _AT_ONCE_BYTES)

    async def decode(self, prompt: ShownPrompt | None) -> None:
        """Decodes the media of a prompt that never were. Raises MediaError if one is damaged."""
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
