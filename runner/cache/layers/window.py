"""RotatingKVCache: a sliding window that becomes a ring once it is full.

What mlx-lm does and what follows from it:

* until `offset` reaches `max_size` the buffer is in temporal order, with room behind `_idx`; afterwards the oldest
  tokens are overwritten, and there is no way back (`trim` moves the counters all the same);
* one forward over many tokens leaves up to `max_size - 1` + its length in the buffer, in temporal order;
* a buffer longer than `_idx` counts as a ring as soon as `_idx < offset`, and one with fewer than
  min(offset, max_size) tokens breaks its growth: whoever sets the arrays sets exactly that many, and `_idx` to it.
"""

from typing import Protocol

import mlx.core as mx

from runner.cache.interface import Miss, Snapshot
from runner.cache.layers.leaf import WholeState
from runner.cache.layers.snapshot import OwnedSnapshot, own

Window = list[mx.array]  # keys and values of the last min(offset, max_size) tokens in temporal order


class Rotating(Protocol):
    """What of RotatingKVCache is read and set."""

    keys: mx.array | None
    values: mx.array | None
    offset: int
    max_size: int
    keep: int
    _idx: int


class WindowState(WholeState[Window]):
    """The window; its `keep` first tokens, if any, stay for good."""

    leaf: Rotating
    refusal = Miss.WINDOW_PASSED

    @property
    def offset(self) -> int:
        return self.leaf.offset

    def rewind(self, to: int) -> bool:
        if to == self.offset:
            return True
        if not 0 <= to < self.offset or self.offset > self.leaf.max_size:
            return False
        self._put([x[..., :to, :] for x in self.arrays()], to)
        return True

    def snapshot(self, start: int) -> Snapshot | None:
        stop = self.offset
        if stop <= start:
            return None
        window = [own(self._last(x)) for x in self.arrays()]
        return OwnedSnapshot(start, stop, window, window)

    def restore(self, snapshot: Snapshot, to: int) -> bool:
        window, stop = self._opened(snapshot), snapshot.stop
        if to != stop and not 0 <= to < stop <= self.leaf.max_size:
            return False
        self._put([own(x[..., :to, :]) for x in window], to)
        return True

    def arrays(self) -> list[mx.array]:
        return [x for x in (self.leaf.keys, self.leaf.values) if x is not None]

    def _put(self, window: Window, offset: int) -> None:
        self.leaf.keys, self.leaf.values = window if offset else (None, None)
        self.leaf.offset = offset
        self.leaf._idx = window[0].shape[-2] if offset else 0

    def _last(self, x: mx.array) -> mx.array:
        """The tokens of the window, oldest first."""
        leaf, idx = self.leaf, self.leaf._idx
        if idx < x.shape[-2]:
            wrapped = idx < leaf.offset
            kept, newer = x[..., : leaf.keep, :], x[..., leaf.keep : idx, :]
            x = mx.concatenate([kept, x[..., idx:, :], newer], axis=-2) if wrapped else x[..., :idx, :]
        surplus = x.shape[-2] - leaf.max_size
        if surplus > 0:
            x = mx.concatenate([x[..., : leaf.keep, :], x[..., leaf.keep + surplus :, :]], axis=-2)
        return x
