"""Requests to a server under measurement. All times are those of the client, in seconds."""

from time import perf_counter
from typing import NamedTuple

from scripts.tools.bench.common.servers import Endpoint

SHORT_TOKENS = 16
"""Of a short prompt."""
FEW_TOKENS = 4
"""Of an answer of which only the first matters."""


class MismeasuredError(Exception):
    """A server did not do what was asked, so its times mean nothing."""


class Answered(NamedTuple):
    """An answer: when it was asked for, the time of each line that holds content, and the content."""

    sent: float
    times: list[float]
    text: str

    @property
    def first_s(self) -> float:
        """Until the first line."""
        return self.times[0] - self.sent

    @property
    def tokens_per_s(self) -> float:
        """After the first one."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


async def answer(endpoint: Endpoint, prompt: str, tokens: int) -> Answered:
    """Returns the whole greedy answer. Raises `MismeasuredError` unless there are as many lines as tokens."""
    times, pieces = [], []
    sent = perf_counter()
    async with endpoint.stream(prompt, tokens) as lines:
        async for text in lines:
            times.append(perf_counter())
            pieces.append(text)
    if len(times) != tokens:
        raise MismeasuredError(f"{len(times)} lines came for {tokens} tokens")
    return Answered(sent, times, "".join(pieces))


async def ask(endpoint: Endpoint, prompt: str, tokens: int) -> list[float]:
    """Returns the times of an answer's lines."""
    return (await answer(endpoint, prompt, tokens)).times


async def first_line_s(endpoint: Endpoint, prompt: str) -> float:
    """Returns the seconds from sending a prompt to its first line; the few other lines are read too."""
    return (await answer(endpoint, prompt, FEW_TOKENS)).first_s
