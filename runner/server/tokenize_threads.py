"""The threads that tokenize, and do nothing else: no long text holds up a short one."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from runner.tokenizer import PART_CHARACTERS

Params = ParamSpec("Params")
Result = TypeVar("Result")
_SHORT_THREADS = 2


class TokenizeThreads:
    """Two threads for texts that are tokenized in one part, one for longer ones, whose parts take turns."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "tokenize")
        self._long = ThreadPoolExecutor(1, "tokenize-long")

    async def run(
        self, size: int, call: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """Do what concerns a text of `size` characters. Cancelled before its turn, it is not done at all."""
        lane = self._short if size <= PART_CHARACTERS else self._long
        return await asyncio.wrap_future(lane.submit(call, *args, **kwargs))
