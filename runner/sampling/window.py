"""The last tokens of some requests, and who leaves when another one comes."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

_BLOCK = 64
"""Columns cut at a time: the graph has one node for all of them."""


class Leaving(NamedTuple):
    """The token that leaves the window of each row."""

    ids: mx.array
    """uint32 [B, 1], below the size of the vocabulary"""
    change: mx.array | float
    """Of its count, float32 [B, 1]: -1, or 0 where only a place becomes free; a number where it is -1 in all rows."""


class Window:
    """The last `places` tokens of each of B rows, in the order in which they came.

    The host knows prompts; of the generated tokens it knows only the arrays that will hold them. An entry beyond the
    vocabulary takes a place and is no token.
    """

    def __init__(self, places: int, vocab_size: int, entries: mx.array) -> None:
        """`entries`, uint32 [B, L]: the last L <= `places` of each row; places of which there are more are free."""
        self.places = places
        self._vocab_size = vocab_size
        self._free = places - entries.shape[1]
        self._entries = entries
        self._next = 0  # the first column of the entries that is not cut
        self._cut: list[Leaving] = []  # the next one to leave is last
        self._recent: deque[mx.array] = deque()  # uint32 [B, 1] each, younger than all of the entries

    @staticmethod
    def of_request(tokens: Sequence[int], places: int, vocab_size: int) -> "Window":
        """The window of one request whose history is `tokens`."""
        entries = [token if token >= 0 else vocab_size for token in tokens[-places:]]
        return Window(places, vocab_size, mx.array([entries], dtype=mx.uint32))

    @staticmethod
    def joined(windows: "Sequence[Window]") -> "Window":
        """All their rows one after the other. They have equally many places."""
        first, *_ = windows
        entries = [window.entries() for window in windows]
        length = max(rows.shape[1] for rows in entries)
        padded = [
            mx.pad(rows, [(0, 0), (length - rows.shape[1], 0)], constant_values=mx.array(first._vocab_size, mx.uint32))
            for rows in entries
        ]
        return Window(first.places, first._vocab_size, mx.concatenate(padded))

    def apart(self) -> "list[Window]":
        """Each row by itself, with an array of its own (lazy). This one is not used afterwards."""
        return [Window(self.places, self._vocab_size, row) for row in own_rows(self.entries())]

    def entries(self) -> mx.array:
        """What stands in it, uint32 [B, L], the oldest first (lazy)."""
        rest = self._entries[:, self._next - len(self._cut) :]
        return mx.concatenate([rest, *self._recent], axis=1)

    def add(self, token: mx.array) -> Leaving | None:
        """Append `token` (uint32 [B, 1], not evaluated) and return what leaves for it; None: nothing in any row."""
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
    """Each row [1, N] of `array` [B, N] as a copy that keeps no other buffer alive (lazy).

    A slice shares the buffer it came from, and so does `mx.contiguous` of something already contiguous; `mx.array` of
    an array copies.
    """
    return [mx.array(mx.contiguous(array[row : row + 1])) for row in range(array.shape[0])]
