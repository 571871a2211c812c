"""Two workloads for an engine over a tiny model, with the right answers."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from scripts.tools.models.tiny import VOCAB, tiny, words
from tests.lib.driver import ask_uncached, largest

SAY = 4
SAY_DRAFTED = 10
"""Tokens of a drafted answer: some rounds."""


class PlannedRequest(NamedTuple):
    """A request of a workload, for `say` tokens. Its client disconnects after `leave_after` slices."""

    prompt: list[int]
    leave_after: int | None = None
    logprobs: bool = False
    say: int = SAY


Wave = Sequence[PlannedRequest]
"""Requests that arrive shortly after each other."""


class Expected(NamedTuple):
    """The answer without a cache, as text, and the number of tokens that are a clear choice: after these, rounding
    decides."""

    text: str
    sure: int


@cache
def expected(kind: str, prompt: tuple[int, ...], say: int = SAY) -> Expected:
    """Returns the right answer, computed without a cache."""
    model = tiny(kind)
    answer = ask_uncached(model, prompt, say=say)
    gaps = [largest(mx.diff(mx.sort(logits)[-2:])) for logits in answer.logits]
    sure = next((step for step, gap in enumerate(gaps) if gap <= model.tolerance), say)
    return Expected(spelled(answer.tokens), sure)


def spelled(tokens: Sequence[int]) -> str:
    """Returns the text of tokens; token i is byte i + 1."""
    return bytes(token + 1 for token in tokens).decode()


def tokens_of(text: str) -> list[int]:
    """Returns the tokens of a text of `spelled`."""
    return [byte - 1 for byte in text.encode()]


@cache
def sequence(kind: str) -> tuple[PlannedRequest, ...]:
    """Ten requests, one at a time: a conversation continues, branches and is edited; one client disconnects during
    prefill and asks again, another disconnects during decode; an answer is regenerated; a prompt exceeds the budget."""
    first = words(50)
    said = tokens_of(expected(kind, tuple(first)).text)
    second = [*first, *said, 1, *words(20, 2)]
    edited = list(second)
    edited[30] = (edited[30] + 5) % VOCAB
    other = words(60, 5)
    return (
        PlannedRequest(first),
        PlannedRequest(second),
        PlannedRequest([*first[:22], 2, *words(25, 3)]),
        PlannedRequest(edited),
        PlannedRequest(other, leave_after=2),
        PlannedRequest(other),
        PlannedRequest(second, logprobs=True),
        PlannedRequest([*other, *tokens_of(expected(kind, tuple(other)).text), 2, 9], leave_after=4),
        PlannedRequest(words(150, 7)),
        PlannedRequest(first),
    )


@cache
def concurrent_waves(kind: str) -> tuple[Wave, ...]:
    """Waves of concurrent requests: two share a prefix, a third arrives during their decode, and there are more
    requests than places. One client disconnects during prefill, one during batched decode, one from the queue."""
    first, other, third = words(90), words(60, 5), words(33, 3)
    said = tokens_of(expected(kind, tuple(first)).text)
    second = [*first, *said, 1, *words(20, 2)]
    return (
        (
            PlannedRequest(first, say=14),
            PlannedRequest([*first[:84], 2, *words(9, 3)], say=9, logprobs=True),
            PlannedRequest(third, say=5),
        ),
        (
            PlannedRequest(second, say=12),
            PlannedRequest(other, leave_after=3),
            PlannedRequest(third, say=12, leave_after=24),
            PlannedRequest([*second[:100], 2, *words(12, 8)], say=7),
            PlannedRequest(words(9, 9), say=4),
            PlannedRequest(words(20, 4), leave_after=0),
        ),
        (
            PlannedRequest(other, say=6),
            PlannedRequest(words(120, 7), say=3),
        ),
    )
