"""The clients of `scripts/bench parallel`, and the figures of one measurement each.

All times are those of the clients, in seconds; a line is one that holds content. Prompts are fresh each time.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import NamedTuple

from scripts.tools.bench.common.requests import FEW_TOKENS, SHORT_TOKENS, MismeasuredError, ask, first_line_s
from scripts.tools.bench.common.servers import Endpoint
from scripts.tools.bench.llamas import Prompts

SUFFIXES = tuple(round(16 + 16 * index / 7) for index in range(8))
"""Lengths of what follows a shared prefix, in tokens."""
PATIENCE_S = 10.0
"""How long a newcomer waits beside a running stream."""
_LONG_TOKENS = 8192
_WARM_LINES = 16
_DROPPED_AT = 0.4


class Rate(NamedTuple):
    """The speed of several streams. `together` is True if they all ran at once, and then only that time counts."""

    tokens_per_s: float
    together: bool

    @classmethod
    def of(cls, answers: Sequence[Sequence[float]]) -> "Rate":
        """From the times of their lines: after all have got their first one, until the first one ends. Streams that
        were never all there at once count from the very first line to the very last."""
        begin, end = max(lines[0] for lines in answers), min(lines[-1] for lines in answers)
        together = begin < end
        if not together:
            begin, end = min(lines[0] for lines in answers), max(lines[-1] for lines in answers)
        counted = sum(begin < line <= end for lines in answers for line in lines)
        return cls(counted / (end - begin), together)


class Gaps(NamedTuple):
    """Between two lines of a running stream, while one prompt was read and answered.

    `newcomer_s` is the time of that prompt's first token; None when it did not come in time.
    """

    largest_s: float
    median_s: float
    newcomer_s: float | None

    @classmethod
    def of(cls, lines: Sequence[float], begin: float, end: float, newcomer_s: float | None) -> "Gaps":
        """`lines` are the times of the running stream, the last of them after `end`; a gap counts as a whole when a
        part of it lies between `begin` and `end`."""
        gaps = [later - earlier for earlier, later in pairwise(lines) if later > begin and earlier < end]
        return cls(max(gaps), median(gaps), newcomer_s)


class Dropped(NamedTuple):
    """A prompt whose client left in the middle of its prefill: the whole prefill's time when nobody leaves, the first
    token of a short request on the idle server, and that of one that comes the moment the client leaves."""

    cold_s: float
    idle_s: float
    after_s: float


class Shared(NamedTuple):
    """Prompts with one prefix. `cold_s`: the first of them alone, nothing known; `warm_s`: each other alone, after it,
    summed; `together_s`: as many that came at once, nothing known, until the last had its first token."""

    cold_s: float
    warm_s: float
    together_s: float

    @property
    def ratio(self) -> float:
        """1 is the time that no sharing can beat: the prefix and all suffixes, each computed once and alone."""
        return self.together_s / (self.cold_s + self.warm_s)


async def decode(endpoint: Endpoint, prompts: Prompts, streams: int, tokens: int) -> Rate:
    """So many streams of so many tokens at once."""
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(endpoint, prompts.text(SHORT_TOKENS), tokens)) for _ in range(streams)]
    return Rate.of([task.result() for task in asked])


async def gaps(endpoint: Endpoint, prompts: Prompts, length: int) -> Gaps:
    """A stream runs, and a prompt of `length` tokens comes."""
    return await gaps_beside(endpoint, prompts, lambda: first_line_s(endpoint, prompts.text(length)), PATIENCE_S)


async def gaps_beside(
    endpoint: Endpoint, prompts: Prompts, newcomer: Callable[[], Awaitable[float]], patience_s: float = PATIENCE_S
) -> Gaps:
    """A stream runs, and a newcomer comes, which returns the seconds until its first line."""
    lines: list[float] = []

    async def run() -> None:
        async with endpoint.stream(prompts.text(SHORT_TOKENS), _LONG_TOKENS) as answer:
            async for _ in answer:
                lines.append(perf_counter())  # noqa: PERF401 - others read the list while it grows

    async def until(ready: float, count: int) -> None:
        """A line after the time `ready`, the one with number `count` or a later one."""
        while len(lines) < count or lines[-1] <= ready:
            if running.done():
                await running
                raise MismeasuredError(f"a stream of {_LONG_TOKENS} tokens ended before its time")
            await asyncio.sleep(0.005)

    running = asyncio.create_task(run())
    try:
        await until(0.0, _WARM_LINES)
        begin, newcomer_s = perf_counter(), None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                newcomer_s = await newcomer()
        end = perf_counter()
        await until(end, 1)
        return Gaps.of(lines, begin, end, newcomer_s)
    finally:
        running.cancel()
        await asyncio.wait([running])


async def drop(endpoint: Endpoint, prompts: Prompts, length: int) -> Dropped:
    """A prompt of `length` tokens comes, its client leaves, and a short one comes."""
    cold_s = await first_line_s(endpoint, prompts.text(length))
    idle_s = await first_line_s(endpoint, prompts.text(SHORT_TOKENS))
    wait_s = _DROPPED_AT * cold_s
    while await _answers_within(wait_s, endpoint, prompts.text(length)):
        wait_s /= 2  # that prefill was quicker than the one measured
    return Dropped(cold_s, idle_s, await first_line_s(endpoint, prompts.text(SHORT_TOKENS)))


async def _answers_within(wait_s: float, endpoint: Endpoint, prompt: str) -> bool:
    """Returns True if the first line comes in that time; if not, the connection is closed."""
    try:
        async with asyncio.timeout(wait_s), endpoint.stream(prompt, FEW_TOKENS) as lines:
            async for _ in lines:
                return True
    except TimeoutError:
        return False
    raise MismeasuredError("an answer had no line")


async def share(endpoint: Endpoint, prompts: Prompts, length: int) -> Shared:
    """Prompts of one prefix of `length` tokens: alone, then, with another prefix, together."""
    alone = _with_suffixes(prompts, length)
    cold_s = await first_line_s(endpoint, alone[0])
    warm_s = sum([await first_line_s(endpoint, prompt) for prompt in alone[1:]])
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(first_line_s(endpoint, prompt)) for prompt in _with_suffixes(prompts, length)]
    return Shared(cold_s, warm_s, max(task.result() for task in asked))


def _with_suffixes(prompts: Prompts, length: int) -> list[str]:
    prefix = prompts.text(length)
    return [prefix + prompts.text(suffix) for suffix in SUFFIXES]
