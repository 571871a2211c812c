"""The threads that prepare requests, and the media that are decoded before a request can go on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import NamedTuple, Self, TypeVar, TypeVarTuple, cast

from runner.engine.ports import Steps, Vision
from runner.engine.request import ShownPrompt
from runner.server.request_body import Body
from runner.tokenizer import PART_CHARACTERS

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
_SHORT_THREADS = 2
_AT_ONCE_BYTES = 512
"""To wake a thread takes longer than to check a body that has no more."""


class TokenizeThreads:
    """The threads that prepare prompts and do nothing else, so that no long text and no picture delays a short text.

    Two are for texts that are tokenized in one part, one for longer texts, whose parts take turns, and one for prompts
    with pictures.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "tokenize")
        self._long = ThreadPoolExecutor(1, "tokenize-long")
        self._pictures = ThreadPoolExecutor(1, "headers")

    async def run(
        self, size: int, call: Callable[[*Arguments], Result], *args: *Arguments, shows: bool = False
    ) -> Result:
        """Runs `call` for a text of `size` characters, or for a prompt that `shows` pictures. If cancelled before its
        turn, it never runs."""
        threads = self._pictures if shows else self._short if size <= PART_CHARACTERS else self._long
        return await asyncio.wrap_future(threads.submit(call, *args))

    async def close(self, _: object) -> None:
        """Ends the threads, with the server."""
        for threads in (self._short, self._long, self._pictures):
            threads.shutdown(wait=False)


class _End(NamedTuple):
    result: object


class Preparation:
    """The checks of one HTTP request, and the media that are decoded for it. When the block ends, decoding ends, and
    rows that the engine has not taken are dropped. Owner: the event loop."""

    def __init__(self, threads: TokenizeThreads, vision: Vision) -> None:
        self._threads = threads
        self._vision = vision
        self._prompts: list[ShownPrompt] = []
        self._left = Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for prompt in self._prompts:
            self._vision.drop(prompt)

    def has_left(self) -> bool:
        """Returns True once the block has ended. Any thread may call this."""
        return self._left.is_set()

    async def check(self, size: int, steps: Steps[Result], *, shows: bool = False, at_once: bool = False) -> Result:
        """Returns the result of the steps, which run on the threads for such a text, or here `at_once`. Decodes the
        media that they yield. Raises RequestError and BadRequestError."""
        while True:
            step = _next(steps) if at_once else await self._threads.run(size, _next, steps, shows=shows)
            if isinstance(step, _End):
                return cast("Result", step.result)
            if step is not None:
                await self.decode(step)

    async def check_body(self, body: Body, steps: Steps[Result]) -> Result:
        """Returns the result of the steps that check a whole body."""
        return await self.check(body.size, steps, at_once=body.size <= _AT_ONCE_BYTES)

    async def decode(self, prompt: ShownPrompt) -> None:
        """Decodes the media of a prompt that never were. Raises MediaError if one is damaged."""
        self._prompts.append(prompt)
        for decoding in self._vision.decode(prompt, self.has_left):
            await asyncio.wrap_future(decoding)


def _next(steps: Steps[object]) -> ShownPrompt | _End | None:
    try:
        return next(steps)
    except StopIteration as end:  # which no future can raise
        return _End(end.value)
