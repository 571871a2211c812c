"""Repeat, presence and frequency penalties over a window of the last tokens."""

from collections import deque
from collections.abc import Hashable, Sequence
from copy import copy as shallow_copy
from typing import NamedTuple

import mlx.core as mx

from runner.sampling.options import SamplingOptions

_BLOCK = 64
"""The number of columns that are cut from a window together, by one node of the graph."""


class Leaving(NamedTuple):
    """For each row, the token that leaves the window."""

    ids: mx.array
    """uint32 [B, 1], below the size of the vocabulary"""
    change: mx.array | float
    """The change of the token's count, float32 [B, 1]: -1, or 0 for a place without a token. The number -1 stands for
    all rows."""


class Window:
    """The last `places` tokens of each of B rows, oldest first.

    The tokens of prompts are numbers; a generated token is an array that is perhaps not evaluated yet. An entry beyond
    the vocabulary has a place but is not counted as a token.
    """

    def __init__(self, places: int, vocab_size: int, entries: mx.array) -> None:
        """`entries`, uint32 [B, L], are the last L <= `places` tokens of each row. The other places are free."""
        self.places = places
        self._vocab_size = vocab_size
        self._free = places - entries.shape[1]
        self._entries = entries
        self._next = 0  # the first column of `_entries` that is not cut yet
        self._cut: list[Leaving] = []  # cut columns; the last one leaves next
        self._recent: deque[mx.array] = deque()  # uint32 [B, 1] each: tokens after `_entries`

    @staticmethod
    def of_request(tokens: Sequence[int], places: int, vocab_size: int) -> "Window":
        """Returns the window of one request with the history `tokens`."""
        entries = [token if token >= 0 else vocab_size for token in tokens[-places:]]
        return Window(places, vocab_size, mx.array([entries], dtype=mx.uint32))

    @staticmethod
    def joined(windows: "Sequence[Window]") -> "Window":
        """Returns a window with the rows of all windows, in order. All windows must have the same number of places."""
        first, *_ = windows
        entries = [window.entries() for window in windows]
        length = max(rows.shape[1] for rows in entries)
        padded = [
            mx.pad(rows, [(0, 0), (length - rows.shape[1], 0)], constant_values=mx.array(first._vocab_size, mx.uint32))
            for rows in entries
        ]
        return Window(first.places, first._vocab_size, mx.concatenate(padded))

    def apart(self) -> "list[Window]":
        """Returns a window for each row, with an array of its own (lazy). This window must not be used afterwards."""
        return [Window(self.places, self._vocab_size, row) for row in own_rows(self.entries())]

    def copy(self) -> "Window":
        """Returns an independent window with the same entries."""
        copied = shallow_copy(self)
        copied._cut = [*self._cut]
        copied._recent = deque(self._recent)
        return copied

    def entries(self) -> mx.array:
        """Returns the tokens in the window, uint32 [B, L], the oldest first (lazy)."""
        rest = self._entries[:, self._next - len(self._cut) :]
        return mx.concatenate([rest, *self._recent], axis=1)

    def push(self, token: mx.array) -> Leaving | None:
        """Appends `token`, uint32 [B, 1] (lazy), to the rows. Returns the tokens that leave, or None if places were
        free."""
        self._recent.append(token)
        if self._free > 0:
            self._free -= 1
            return None
        if not self._cut and self._next < self._entries.shape[1]:
            self._cut = self._cut_block()
        return self._cut.pop() if self._cut else Leaving(self._recent.popleft(), -1.0)

    def _cut_block(self) -> list[Leaving]:
        block = self._entries[:, self._next : self._next + _BLOCK]
        self._next += block.shape[1]
        ids = mx.minimum(block, self._vocab_size - 1).split(block.shape[1], axis=1)
        changes = ((block >= self._vocab_size).astype(mx.float32) - 1).split(block.shape[1], axis=1)
        return [Leaving(*column) for column in zip(ids[::-1], changes[::-1], strict=True)]


def own_rows(array: mx.array) -> list[mx.array]:
    """Returns each row [1, N] of `array` [B, N] as a copy that keeps no other buffer alive (lazy). A slice shares the
    buffer of its array, and so does `mx.contiguous` of a contiguous array. `mx.array` copies."""
    return [mx.array(mx.contiguous(array[row : row + 1])) for row in range(array.shape[0])]


class Penalties:
    """The penalties of B rows of one kind, and the count of each token in their windows.

    Generated tokens are not read from the device, so the device keeps and updates the counts. The time of a step does
    not depend on the length of the window. Owner: the engine thread.
    """

    def __init__(self, options: Sequence[SamplingOptions], counts: mx.array, window: Window | None) -> None:
        """`options` are the normalised options of each row. `counts`, float32 [B, V], are the counts of the tokens in
        the windows. Without a window, no token leaves."""
        self._options = options
        self._counts = counts
        self._window = window
        self._repeat = _column([each.repeat_penalty for each in options], off=1)
        self._presence = _column([each.presence_penalty for each in options], off=0)
        self._frequency = _column([each.frequency_penalty for each in options], off=0)
        # For r >= 1, the smaller of x*r and x/r is the product if x is negative, else the quotient.
        self._lower = mx.minimum if options[0].repeat_penalty >= 1 else mx.maximum

    @staticmethod
    def of_request(
        options: SamplingOptions, history: Sequence[int], vocab_size: int, context_length: int
    ) -> "Penalties":
        """Returns the penalties of one request. `options` are normalised, with repeat_last_n > 0. Ids in `history`
        beyond the vocabulary have a place in the window but no count."""
        last_n = options.repeat_last_n
        # A window as long as the context never loses a token, so the order of tokens does not matter.
        window = Window.of_request(history, last_n, vocab_size) if last_n < context_length else None
        return Penalties([options], _count(history[-last_n:], vocab_size), window)

    @staticmethod
    def joined(parts: "Sequence[Penalties]") -> "Penalties":
        """Returns the rows of all `parts`, in order. The parts must be of one kind."""
        windows = [part._window for part in parts if part._window is not None]
        return Penalties(
            [each for part in parts for each in part._options],
            mx.concatenate([part._counts for part in parts]),
            Window.joined(windows) if windows else None,
        )

    def apart(self) -> "list[Penalties]":
        """Returns an object for each row, with arrays of its own (lazy). This object must not be used afterwards."""
        windows = self._window.apart() if self._window is not None else [None] * len(self._options)
        rows = zip(self._options, own_rows(self._counts), windows, strict=True)
        return [Penalties([each], counts, window) for each, counts, window in rows]

    def copy(self) -> "Penalties":
        """Returns an independent object with the same state."""
        copied = shallow_copy(self)
        copied._window = self._window.copy() if self._window is not None else None
        return copied

    @property
    def kind(self) -> Hashable:
        """The properties that rows must have in common to be joined."""
        return self._window.places if self._window is not None else None, self._lower is mx.minimum

    def arrays(self) -> list[mx.array]:
        """Returns the arrays that hold the state between steps."""
        return [self._counts, *([self._window.entries()] if self._window is not None else [])]

    def apply(self, scores: mx.array) -> mx.array:
        """Returns `scores` (float32 [B, V]) with the penalties for the tokens in the windows."""
        seen = self._counts > 0
        if self._repeat is not None:
            scores = mx.where(seen, self._lower(scores * self._repeat, scores / self._repeat), scores)
        if self._presence is not None:
            scores = scores - seen * self._presence
        if self._frequency is not None:
            scores = scores - self._counts * self._frequency
        return scores

    def apply_ahead(self, scores: mx.array, drafts: Sequence[int]) -> mx.array:
        """Returns `scores` (float32 [1 + D, V]) with the penalties of this object's only row: row i as if the first i
        drafts had been recorded. Records nothing."""
        ahead = self.copy()
        counts = [self._counts]
        for draft in drafts:
            ahead.record(mx.array([draft], dtype=mx.uint32))
            counts.append(ahead._counts)
        return Penalties(self._options, mx.concatenate(counts), None).apply(scores)

    def record(self, token: mx.array) -> None:
        """Appends `token` (uint32 [B], lazy) to the windows."""
        index = token[:, None]
        self._change_count(index, 1.0)
        leaving = self._window.push(index) if self._window is not None else None
        if leaving is not None:
            self._change_count(leaving.ids, leaving.change)

    def _change_count(self, index: mx.array, change: float | mx.array) -> None:
        count = mx.take_along_axis(self._counts, index, axis=-1)
        self._counts = mx.put_along_axis(self._counts, index, count + change, axis=-1)


def _count(tokens: Sequence[int], vocab_size: int) -> mx.array:
    counts = mx.zeros((1, vocab_size))
    inside = [token for token in tokens if 0 <= token < vocab_size]
    return counts.at[0, mx.array(inside, dtype=mx.uint32)].add(1.0) if inside else counts


def _column(values: Sequence[float], off: float) -> mx.array | None:
    """Returns the penalties of all rows, float32 [B, 1]; None if the penalty is off in every row."""
    return mx.array([[value] for value in values], dtype=mx.float32) if {*values} != {off} else None
