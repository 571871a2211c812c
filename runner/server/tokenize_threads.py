"""The threads that tokenize and do nothing else, so that no long text delays a short one."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from runner.tokenizer import PART_CHARACTERS

Params = ParamSpec("Params")
Result = TypeVar("Result")
_SHORT_THREADS = 2


class TokenizeThreads:
    """Two threads for texts that are tokenized in one part, and one for longer texts, whose parts take turns."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "tokenize")
        self._long = ThreadPoolExecutor(1, "tokenize-long")

    async def run(
        self, size: int, call: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """Runs `call` for a text of `size` characters. If cancelled before its turn, it never runs."""
        threads = self._short if size <= PART_CHARACTERS else self._long
        return await asyncio.wrap_future(threads.submit(call, *args, **kwargs))
