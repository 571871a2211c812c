"""Two days in the life of an engine over a tiny model, and the right answers."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from scripts.tools.models.tiny import VOCAB, tiny, words
from tests.lib.driver import ask_uncached, largest

SAY = 4


class Ask(NamedTuple):
    """A request of the day, for so many tokens; `leave_after` so many slices its client goes away."""

    prompt: list[int]
    leave_after: int | None = None
    logprobs: bool = False
    say: int = SAY


Wave = Sequence[Ask]
"""Requests that come shortly after each other."""


class Expected(NamedTuple):
    """What the model says without a cache, as text, and the first token that is no clear choice: from there on a
    rounding decides."""

    text: str
    sure: int


@cache
def expected(kind: str, prompt: tuple[int, ...], say: int = SAY) -> Expected:
    """The oracle."""
    model = tiny(kind)
    answer = ask_uncached(model, prompt, say=say)
    gaps = [largest(mx.diff(mx.sort(logits)[-2:])) for logits in answer.logits]
    sure = next((step for step, gap in enumerate(gaps) if gap <= model.tolerance), say)
    return Expected(spelled(answer.tokens), sure)


def spelled(tokens: Sequence[int]) -> str:
    """Token i is byte i + 1."""
    return bytes(token + 1 for token in tokens).decode()


def _tokens(text: str) -> list[int]:
    return [byte - 1 for byte in text.encode()]


@cache
def day(kind: str) -> tuple[Ask, ...]:
    """Ten requests: a conversation goes on, branches, is edited; a client leaves in the prefill and asks again, another
    one leaves in the answer; an answer is made anew; a prompt is longer than the budget."""
    first = words(50)
    said = _tokens(expected(kind, tuple(first)).text)
    second = [*first, *said, 1, *words(20, 2)]
    edited = list(second)
    edited[30] = (edited[30] + 5) % VOCAB
    other = words(60, 5)
    return (
        Ask(first),
        Ask(second),
        Ask([*first[:22], 2, *words(25, 3)]),
        Ask(edited),
        Ask(other, leave_after=2),
        Ask(other),
        Ask(second, logprobs=True),
        Ask([*other, *_tokens(expected(kind, tuple(other)).text), 2, 9], leave_after=4),
        Ask(words(150, 7)),
        Ask(first),
    )


@cache
def busy_day(kind: str) -> tuple[Wave, ...]:
    """Requests that meet: two that begin alike, a third that comes while they are answered, more of them than there are
    places; one leaves while its prompt is read, one while it is answered with others, one from the queue."""
    first, other, third = words(90), words(60, 5), words(33, 3)
    said = _tokens(expected(kind, tuple(first)).text)
    second = [*first, *said, 1, *words(20, 2)]
    return (
        (
            Ask(first, say=14),
            Ask([*first[:84], 2, *words(9, 3)], say=9, logprobs=True),
            Ask(third, say=5),
        ),
        (
            Ask(second, say=12),
            Ask(other, leave_after=3),
            Ask(third, say=12, leave_after=24),
            Ask([*second[:100], 2, *words(12, 8)], say=7),
            Ask(words(9, 9), say=4),
            Ask(words(20, 4), leave_after=0),
        ),
        (
            Ask(other, say=6),
            Ask(words(120, 7), say=3),
        ),
    )
