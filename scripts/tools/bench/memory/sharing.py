"""Conversations that begin with one prefix and take turns, and what is held after each of their requests."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import mlx.core as mx

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__

# isort: split
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, LRUPromptCache, make_prompt_cache

from runner.cache import Session, make_cache

_CHUNK = 512
_MANY = 1 << 30

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


class Cache(Protocol):
    """A cache in front of a model."""

    @property
    def nbytes(self) -> int:
        """The bytes that it holds, by its own count."""
        ...

    def serve(self, prompt: list[int], answer: Sequence[int]) -> None:
        """A request, answered with these tokens whatever the model says."""
        ...


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


def hold(cache: Cache, shape: Shape, fresh: Callable[[int], list[int]]) -> list[int]:
    """Bytes held after each request, served in this process."""
    held, answer = [], list[int]()
    for prompt in requests(shape, fresh):
        asked, answer = prompt(answer), fresh(shape.answer)
        cache.serve(asked, answer)
        held.append(cache.nbytes)
    return held


async def converse(answer: Callable[[str], Awaitable[str]], shape: Shape, fresh: Callable[[int], str]) -> None:
    """All requests, over whatever answers them."""
    said = ""
    for prompt in requests(shape, fresh):
        said = await answer(prompt(said))


class Trie:
    """This runner's cache."""

    def __init__(self, model: llama.Model) -> None:
        self._model = model
        self._cache = make_cache("trie", lambda: list(make_prompt_cache(model)))

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    @property
    def token_bytes(self) -> int:
        """Of one token in all layers; known after the first request."""
        return self._cache.session_bytes(2) - self._cache.session_bytes(1)

    def serve(self, prompt: list[int], answer: Sequence[int]) -> None:
        session = self._cache.begin(prompt)
        try:
            while session.position < len(prompt):
                self._forward(session, session.next_forward(_CHUNK) or 1)
            for token in answer[:-1]:
                session.record(token)
                self._forward(session, 1)
            session.record(answer[-1])
        finally:
            session.close()

    def _forward(self, session: Session, count: int) -> None:
        at = session.position
        with session.forward(count):
            logits = self._model(mx.array([session.recorded[at : at + count]]), session.layers)
        mx.eval(logits, session.state())


class LastUsed:
    """mlx-lm's cache, as its server uses it: whole copies of the conversations used last, at most `size` of them."""

    def __init__(self, model: llama.Model, size: int = _MANY) -> None:
        self._model = model
        self._cache = LRUPromptCache(size)

    @property
    def nbytes(self) -> int:
        return int(self._cache.nbytes)

    def serve(self, prompt: list[int], answer: Sequence[int]) -> None:
        layers, rest = self._cache.fetch_nearest_cache("", prompt)
        layers = layers or make_prompt_cache(self._model)
        for at in range(0, len(rest), _CHUNK):
            self._forward(rest[at : at + _CHUNK], layers)
        for token in answer[:-1]:
            self._forward([token], layers)
        self._cache.insert_cache("", [*prompt, *answer[:-1]], layers)

    def _forward(self, tokens: Sequence[int], layers: list[KVCache]) -> None:
        mx.eval(self._model(mx.array([[*tokens]]), layers), [layer.state for layer in layers])
