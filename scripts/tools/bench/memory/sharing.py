"""Conversations that begin with one prefix and take turns."""

from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple, TypeVar

Piece = TypeVar("Piece", str, list[int])
"""Of a conversation: text, or token ids."""


class Shape(NamedTuple):
    """The number of conversations and of their requests, and the tokens of prefix, messages and answers."""

    prefix: int = 1000
    conversations: int = 30
    turns: int = 2
    message: int = 60
    answer: int = 16

    def distinct(self, requests: int) -> int:
        """Tokens that a model has seen after so many requests, those with equal tokens before them counted once. The
        last token of an answer is not shown to it before the next turn."""
        spoken = min(requests, self.conversations)
        return self.prefix * (requests > 0) + requests * (self.message + self.answer) - spoken


def requests(shape: Shape, fresh: Callable[[int], Piece]) -> Iterator[Callable[[Piece], Piece]]:
    """For each request a function that takes the answer of the one before it, whichever conversation that was in, and
    gives the prompt. `fresh` makes so many tokens that were never seen."""
    histories = [fresh(shape.prefix)] * shape.conversations
    last: int | None = None

    def prompt_of(speaker: int, message: Piece) -> Callable[[Piece], Piece]:
        def prompt(answer: Piece) -> Piece:
            nonlocal last
            if last is not None:
                histories[last] = histories[last] + answer
            last = speaker
            histories[speaker] = histories[speaker] + message
            return histories[speaker]

        return prompt

    for _ in range(shape.turns):
        for speaker in range(shape.conversations):
            yield prompt_of(speaker, fresh(shape.message))


async def converse(answer: Callable[[str], Awaitable[str]], shape: Shape, fresh: Callable[[int], str]) -> None:
    """All requests, over whatever answers them."""
    said = ""
    for prompt in requests(shape, fresh):
        said = await answer(prompt(said))
