"""The last tokens of each request, to which penalties apply."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

_BLOCK = 64
"""The columns that are cut at a time: they take one node of the graph."""


class Leaving(NamedTuple):
    """The token that leaves the window of each row."""

    ids: mx.array
    """uint32 [B, 1], below the size of the vocabulary"""
    change: mx.array | float
    """The change of its count, float32 [B, 1]: -1, or 0 if no token was in that place; a number if it is -1 in all
    rows."""


class Window:
    """The last `places` tokens of each of B rows, in the order in which they came.

    Prompts are known on the host; a generated token is an array that may not be evaluated yet. An entry beyond the
    vocabulary takes a place and counts as no token.
    """

    def __init__(self, places: int, vocab_size: int, entries: mx.array) -> None:
        """`entries`, uint32 [B, L], are the last L <= `places` tokens of each row; the other places are free."""
        self.places = places
        self._vocab_size = vocab_size
        self._free = places - entries.shape[1]
        self._entries = entries
        self._next = 0  # the first column of the entries that is not cut
        self._cut: list[Leaving] = []  # the next one to leave is last
        self._recent: deque[mx.array] = deque()  # uint32 [B, 1] each, younger than all of the entries

    @staticmethod
    def of_request(tokens: Sequence[int], places: int, vocab_size: int) -> "Window":
        """Returns the window of one request whose history is `tokens`."""
        entries = [token if token >= 0 else vocab_size for token in tokens[-places:]]
        return Window(places, vocab_size, mx.array([entries], dtype=mx.uint32))

    @staticmethod
    def joined(windows: "Sequence[Window]") -> "Window":
        """Returns the rows of all windows, one after the other. All windows have the same number of places."""
        first, *_ = windows
        entries = [window.entries() for window in windows]
        length = max(rows.shape[1] for rows in entries)
        padded = [
            mx.pad(rows, [(0, 0), (length - rows.shape[1], 0)], constant_values=mx.array(first._vocab_size, mx.uint32))
            for rows in entries
        ]
        return Window(first.places, first._vocab_size, mx.concatenate(padded))

    def apart(self) -> "list[Window]":
        """Returns each row by itself, with an array of its own (lazy). This window must not be used afterwards."""
        return [Window(self.places, self._vocab_size, row) for row in own_rows(self.entries())]

    def copy(self) -> "Window":
        """Returns another window of the same entries."""
        copied = Window(self.places, self._vocab_size, self._entries)
        copied._free, copied._next, copied._cut = self._free, self._next, [*self._cut]
        copied._recent = deque(self._recent)
        return copied

    def entries(self) -> mx.array:
        """Returns the entries, uint32 [B, L], the oldest first (lazy)."""
        rest = self._entries[:, self._next - len(self._cut) :]
        return mx.concatenate([rest, *self._recent], axis=1)

    def add(self, token: mx.array) -> Leaving | None:
        """Appends `token`, uint32 [B, 1] (lazy). Returns the tokens that leave; None if none leaves any row."""
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
    """Returns each row [1, N] of `array` [B, N] as a copy that keeps no other buffer alive (lazy).

    A slice shares the buffer of its array, and so does `mx.contiguous` of a contiguous array; `mx.array` of an array
    copies.
    """
    return [mx.array(mx.contiguous(array[row : row + 1])) for row in range(array.shape[0])]
