"""Repeat, presence and frequency penalties over a window of the last tokens."""

from collections.abc import Hashable, Iterable, Sequence

import mlx.core as mx

from runner.sampling.options import SamplingOptions
from runner.sampling.window import Window, own_rows


class Penalties:
    """The penalties of B rows of one kind, and the count of each token in their windows.

    The host does not know the generated tokens, so the counts are kept and updated on the device. The cost of a step
    does not depend on the length of the window. Owned by the sampler of the rows; used only by the engine thread.
    """

    def __init__(self, options: Sequence[SamplingOptions], counts: mx.array, window: Window | None) -> None:
        """Takes each row's normalised `options`, and `counts`, float32 [B, V]. Without a window, no token leaves."""
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
        # For r >= 1, the smaller one of x*r and x/r is the product if x is negative, else the quotient.
        self._lower = mx.minimum if options[0].repeat_penalty >= 1 else mx.maximum

    @staticmethod
    def of_request(
        options: SamplingOptions, history: Sequence[int], vocab_size: int, context_length: int
    ) -> "Penalties":
        """Returns the penalties of one request. `options` are normalised, with repeat_last_n > 0.

        Ids in `history` beyond the vocabulary take a place in the window but have no count.
        """
        last_n = options.repeat_last_n
        # A window as long as the context never loses a token, so the order of tokens does not matter.
        window = Window.of_request(history, last_n, vocab_size) if last_n < context_length else None
        return Penalties([options], _count(history[-last_n:], vocab_size), window)

    @staticmethod
    def joined(parts: "Sequence[Penalties]") -> "Penalties":
        """Concatenates the rows of `parts`, which are of one kind."""
        windows = [part._window for part in parts if part._window is not None]
        return Penalties(
            [wish for part in parts for wish in part._options],
            mx.concatenate([part._counts for part in parts]),
            Window.joined(windows) if windows else None,
        )

    def apart(self) -> "list[Penalties]":
        """Splits the rows into objects with arrays of their own (lazy). This object must not be used afterwards."""
        windows = self._window.apart() if self._window is not None else [None] * len(self._options)
        rows = zip(self._options, own_rows(self._counts), windows, strict=True)
        return [Penalties([wish], counts, window) for wish, counts, window in rows]

    def copy(self) -> "Penalties":
        """Returns another object of the same state; what one of them records, the other does not see."""
        return Penalties(self._options, self._counts, self._window.copy() if self._window is not None else None)

    @property
    def kind(self) -> Hashable:
        """The properties that rows must have in common to be joined."""
        return self._window.places if self._window is not None else None, self._lower is mx.minimum

    @property
    def counts(self) -> mx.array:
        """The count of each token in the windows, float32 [B, V], lazy."""
        return self._counts

    def arrays(self) -> list[mx.array]:
        """Returns the state that is kept between steps."""
        return [self._counts, *([self._window.entries()] if self._window is not None else [])]

    def apply(self, scores: mx.array) -> mx.array:
        """Applies the penalties for the tokens in the windows to `scores` (float32 [B, V])."""
        seen = self._counts > 0
        if self._repeat is not None:
            scores = mx.where(seen, self._lower(scores * self._repeat, scores / self._repeat), scores)
        if self._presence is not None:
            scores = scores - seen * self._presence
        if self._frequency is not None:
            scores = scores - self._counts * self._frequency
        return scores

    def apply_ahead(self, scores: mx.array, drafts: Sequence[int]) -> mx.array:
        """Applies the penalties of the only row to `scores` (float32 [1 + D, V]): each score of row i as if the first i
        drafts had been recorded. Records nothing."""
        ahead = self.copy()
        counts = [self._counts]
        for draft in drafts:
            ahead.record(mx.array([draft], dtype=mx.uint32))
            counts.append(ahead.counts)
        return Penalties(self._options, mx.concatenate(counts), None).apply(scores)

    def record(self, token: mx.array) -> None:
        """Appends `token` (uint32 [B], lazy) to the windows."""
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
