"""Repeat, presence and frequency penalties over a window of the last tokens."""

from collections.abc import Hashable, Iterable, Sequence

import mlx.core as mx

from runner.sampling.options import SamplingOptions
from runner.sampling.window import Window, own_rows


class Penalties:
    """The penalties of B rows of one kind and how often each token stands in the windows that they look at.

    The host does not know the generated tokens, so the counts live on the device and are advanced there. One step costs
    the same whatever the length of the window. Owned by the rows' sampler, used by the engine's thread only.
    """

    def __init__(self, options: Sequence[SamplingOptions], counts: mx.array, window: Window | None) -> None:
        """`options` of each row, normalised; `counts`, float32 [B, V]. Without a window no token ever leaves."""
        self._options = options
        self._counts = counts
        self._window = window
        self._repeat = self._presence = self._frequency = None
        if any(wish.repeat_penalty != 1 for wish in options):
            self._repeat = _column(wish.repeat_penalty for wish in options)
        if any(wish.presence_penalty != 0 for wish in options):
            self._presence = _column(wish.presence_penalty for wish in options)
        if any(wish.frequency_penalty != 0 for wish in options):
            self._frequency = _column(wish.frequency_penalty for wish in options)
        # Of x*r and x/r the smaller one, for r >= 1, is the product where x is negative and else the quotient.
        self._lower = mx.minimum if options[0].repeat_penalty >= 1 else mx.maximum

    @staticmethod
    def of_request(
        options: SamplingOptions, history: Sequence[int], vocab_size: int, context_length: int
    ) -> "Penalties":
        """Those of one request: `options` are normalised, with repeat_last_n > 0.

        Ids of `history` beyond the vocabulary only take a place.
        """
        last_n = options.repeat_last_n
        # A window as long as the context never loses a token: then nobody needs to know which came when.
        window = Window.of_request(history, last_n, vocab_size) if last_n < context_length else None
        return Penalties([options], _count(history[-last_n:], vocab_size), window)

    @staticmethod
    def joined(parts: "Sequence[Penalties]") -> "Penalties":
        """The rows of all `parts`, which are of one kind, one after the other."""
        windows = [part._window for part in parts if part._window is not None]
        return Penalties(
            [wish for part in parts for wish in part._options],
            mx.concatenate([part._counts for part in parts]),
            Window.joined(windows) if windows else None,
        )

    def apart(self) -> "list[Penalties]":
        """Each row by itself, with arrays of its own (lazy). This one is not used afterwards."""
        windows = self._window.apart() if self._window is not None else [None] * len(self._options)
        rows = zip(self._options, own_rows(self._counts), windows, strict=True)
        return [Penalties([wish], counts, window) for wish, counts, window in rows]

    @property
    def kind(self) -> Hashable:
        """What rows must have in common to be joined."""
        return self._window.places if self._window is not None else None, self._lower is mx.minimum

    @property
    def counts(self) -> mx.array:
        """How often each token stands in the windows, float32 [B, V], not evaluated."""
        return self._counts

    def arrays(self) -> list[mx.array]:
        """What is remembered from step to step."""
        return [self._counts, *([self._window.entries()] if self._window is not None else [])]

    def apply(self, scores: mx.array) -> mx.array:
        """`scores` (float32 [B, V]) with the penalties for what stands in the windows."""
        seen = self._counts > 0
        if self._repeat is not None:
            scores = mx.where(seen, self._lower(scores * self._repeat, scores / self._repeat), scores)
        if self._presence is not None:
            scores = scores - seen * self._presence
        if self._frequency is not None:
            scores = scores - self._counts * self._frequency
        return scores

    def record(self, token: mx.array) -> None:
        """Append `token` (uint32 [B], not evaluated) to the windows."""
        index = token[:, None]
        self._add(index, 1.0)
        leaving = self._window.add(index) if self._window is not None else None
        if leaving is not None:
            self._add(leaving.ids, leaving.change)

    def _add(self, index: mx.array, change: float | mx.array) -> None:
        count = mx.take_along_axis(self._counts, index, axis=-1)
        self._counts = mx.put_along_axis(self._counts, index, count + change, axis=-1)


def _count(tokens: Sequence[int], vocab_size: int) -> mx.array:
    counts = mx.zeros((1, vocab_size))
    inside = [token for token in tokens if 0 <= token < vocab_size]
    return counts.at[0, mx.array(inside, dtype=mx.uint32)].add(1.0) if inside else counts


def _column(values: Iterable[float]) -> mx.array:
    return mx.array([[value] for value in values], dtype=mx.float32)
