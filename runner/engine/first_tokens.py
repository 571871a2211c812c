"""The logits after recent prompts. If a prompt comes again, the first token of its answer needs no forward."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

import mlx.core as mx

from runner.engine.request import Request
from runner.sampling.sampler import Sampler

_MOST_BYTES = 16 << 20
"""Enough for sixteen prompts of a model whose vocabulary has a quarter of a million tokens."""


class FirstTokens:
    """Keeps the logits of the last token of recent prompts, by the keys of each prompt. Owner: the engine thread."""

    def __init__(self, context_length: int, most_bytes: int = _MOST_BYTES) -> None:
        self._context_length = context_length
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, mx.array] = OrderedDict()
        self._nbytes = 0

    def keep(self, keys: Sequence[int], logits: mx.array) -> None:
        """Keeps the logits [1, V] after a prompt, evaluated, so that the arrays they come from can be freed."""
        mx.eval(logits)
        name = _name(keys)
        if name not in self._kept:
            self._nbytes += logits.nbytes
        self._kept[name] = logits
        self._kept.move_to_end(name)
        while self._nbytes > self._most_bytes:
            self._nbytes -= self._kept.popitem(last=False)[1].nbytes

    def draw(self, request: Request) -> int | None:
        """Returns the token that a request draws first; None if it is unknown, or would be the only token."""
        if request.max_tokens < 2 or not draws_plainly(request):
            return None
        name = _name(request.keys)
        logits = self._kept.get(name)
        if logits is None:
            return None
        self._kept.move_to_end(name)
        sampler = Sampler(request.sampling, request.prompt, logits.shape[-1], self._context_length)
        return sampler(logits).read()[0].token

    def clear(self) -> None:
        """Forgets all logits."""
        self._kept.clear()
        self._nbytes = 0


def draws_plainly(request: Request) -> bool:
    """Returns True if the first token depends only on the logits and the sampler, and no scores are wanted."""
    return request.grammar is None and not request.sampling.logprobs and not request.sampling.candidates


def _name(keys: Sequence[int]) -> bytes:
    return sha256(array("q", keys)).digest()
