"""The threads that prepare prompts and do nothing else, so that no long text and no picture delays a short text."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import ParamSpec, TypeVar

from runner.tokenizer import PART_CHARACTERS

Params = ParamSpec("Params")
Result = TypeVar("Result")
_SHORT_THREADS = 2


class TokenizeThreads:
    """Two threads for texts that are tokenized in one part, one for longer texts, whose parts take turns, and one for
    prompts with pictures."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "tokenize")
        self._long = ThreadPoolExecutor(1, "tokenize-long")
        self._pictures = ThreadPoolExecutor(1, "headers")

    async def run(
        self, size: int, call: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """Runs `call` for a text of `size` characters. If cancelled before its turn, it never runs."""
        threads = self._short if size <= PART_CHARACTERS else self._long
        return await asyncio.wrap_future(threads.submit(call, *args, **kwargs))

    async def show(self, call: Callable[[Callable[[], bool]], Result]) -> Result:
        """Runs `call` for a prompt with pictures. If cancelled before its turn, it never runs; after that, what it is
        given returns True."""
        left = Event()
        try:
            return await asyncio.wrap_future(self._pictures.submit(call, left.is_set))
        finally:
            left.set()

    async def close(self, _: object) -> None:
        """Ends the threads, with the server."""
        for threads in (self._short, self._long, self._pictures):
            threads.shutdown(wait=False)
