"""Repeat, presence and frequency penalties over a window of the last tokens."""

from collections import deque
from collections.abc import Sequence

import mlx.core as mx

from runner.sampling.options import SamplingOptions


class Penalties:
    """The penalties of one request and the window of tokens that they look at.

    The host knows the prompt; of the generated tokens it knows only the arrays that will hold them, so the counts live
    on the device and are advanced there. One step costs the same whatever the length of the window. Owned by the
    request's sampler, used by the engine's thread only.
    """

    def __init__(self, options: SamplingOptions, prompt: Sequence[int], vocab_size: int, context_length: int) -> None:
        """`options` are normalised, with repeat_last_n > 0; ids of `prompt` beyond the vocabulary only take a place."""
        self._repeat = options.repeat_penalty
        self._presence = options.presence_penalty
        self._frequency = options.frequency_penalty
        self._vocab_size = vocab_size
        window = prompt[-options.repeat_last_n :]
        self._counts = self._count(window)
        # A window as long as the context never loses a token: then nobody needs to know which came when.
        self._free = options.repeat_last_n - len(window)
        self._window: deque[int | mx.array] | None = None
        if options.repeat_last_n < context_length:
            self._window = deque(window)

    @property
    def counts(self) -> mx.array:
        """How often each token stands in the window, float32 [1, V], not evaluated."""
        return self._counts

    def apply(self, scores: mx.array) -> mx.array:
        """`scores` (float32 [1, V]) with the penalties for what stands in the window."""
        seen = self._counts > 0
        if self._repeat != 1:
            # Of x*r and x/r the smaller one, for r > 1, is the product where x is negative and else the quotient.
            lower = mx.minimum if self._repeat > 1 else mx.maximum
            scores = mx.where(seen, lower(scores * self._repeat, scores / self._repeat), scores)
        if self._presence != 0:
            scores = scores - seen * self._presence
        if self._frequency != 0:
            scores = scores - self._counts * self._frequency
        return scores

    def record(self, token: mx.array) -> None:
        """Append `token` (uint32 [1], not evaluated) to the window."""
        self._add(token, 1.0)
        if self._window is None:
            return
        self._window.append(token)
        if self._free > 0:
            self._free -= 1
            return
        oldest = self._window.popleft()
        if isinstance(oldest, mx.array):
            self._add(oldest, -1.0)
        elif 0 <= oldest < self._vocab_size:
            self._add(mx.array([oldest], dtype=mx.uint32), -1.0)

    def _add(self, token: mx.array, amount: float) -> None:
        index = token[:, None]
        count = mx.take_along_axis(self._counts, index, axis=-1)
        self._counts = mx.put_along_axis(self._counts, index, count + amount, axis=-1)

    def _count(self, tokens: Sequence[int]) -> mx.array:
        counts = mx.zeros((1, self._vocab_size))
        inside = [token for token in tokens if 0 <= token < self._vocab_size]
        return counts.at[0, mx.array(inside, dtype=mx.uint32)].add(1.0) if inside else counts
