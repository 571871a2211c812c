"""Layers with a tail: keys and values of the last tokens, back to the first token that attention may look at.

RotatingKVCache is a sliding window that becomes a ring once it is full. In mlx-lm:

* until `offset` reaches `max_size` the buffer is in temporal order, with room after `_idx`; from then on new tokens
  overwrite the oldest, and the layer cannot go back (`trim` moves the counters nevertheless);
* a forward over n tokens leaves up to `max_size - 1 + n` tokens in the buffer, in temporal order;
* so the layer can go back to any offset after the first token of such a forward: the buffer holds the tokens for it;
* a buffer longer than `_idx` counts as a ring as soon as `_idx < offset`, and a buffer with fewer than min(offset,
  max_size) tokens cannot grow: code that sets the arrays must set exactly that many tokens, and `_idx` to their number.

ChunkedKVCache (Llama 4): a token looks back to the start of its chunk, and no further. The start of a forward drops the
oldest tokens, so that at most `chunk_size` stay. `trim` and `is_trimmable` of this class ignore chunks.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from runner.cache.layer_interface import Miss, Snapshot
from runner.cache.layers.adapter import LayerState, Mark
from runner.cache.layers.rows import KVRows
from runner.cache.layers.snapshot import Buffers, Ledger, Owned, TailSnapshot, own


class TailState(LayerState):
    """A layer with a tail: the keys and values of the last tokens."""

    refusal = Miss.WINDOW_PASSED
    kind = TailSnapshot
    markable = True
    layer: RotatingKVCache | ChunkedKVCache

    def __init__(self, layer: RotatingKVCache | ChunkedKVCache, ledger: Ledger, needs: Callable[[int], int]) -> None:
        super().__init__(layer, ledger)
        self.needs = needs

    @property
    def offset(self) -> int:
        return self.layer.offset

    def arrays(self) -> list[mx.array]:
        return [x for x in (self.layer.keys, self.layer.values) if x is not None]

    @property
    def point_bytes(self) -> int:
        needed = self.offset - self.needs(self.offset)  # after a forward over many tokens the buffers hold more
        return sum(x.nbytes * min(needed, x.shape[-2]) // x.shape[-2] for x in self.arrays())

    def copy_tokens(self, start: int, stop: int) -> Owned:
        entries = [own(self._between(x, start, stop)) for x in self.arrays()]
        return Owned(entries, entries)

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        self._check_none_live()
        at = stop = snapshots[-1].stop
        needed = self.needs(stop)
        pieces: list[Buffers] = []
        for snapshot in reversed(snapshots):
            if not isinstance(snapshot, TailSnapshot):
                raise TypeError(f"{type(self).__name__} made no {type(snapshot).__name__}")
            if snapshot.stop < at:
                break
            start = max(snapshot.start, needed)
            if start < at:
                pieces.insert(0, snapshot.parts(start, at))
                at = start
        if at != needed:
            raise ValueError(f"tokens {needed}..{at} are missing to stand at {stop}")
        # Always a copy, even of a single piece: the snapshots stay where they are.
        buffers = [own(mx.concatenate([*same], axis=-2)) for same in zip(*pieces, strict=True)]
        self._put(buffers, stop)

    @abstractmethod
    def _put(self, buffers: Buffers, offset: int) -> None:
        """Makes `buffers` the buffers of the layer, at `offset`. Other objects must not hold them."""

    @abstractmethod
    def _between(self, x: mx.array, start: int, stop: int) -> mx.array:
        """Returns the entries of a buffer `x` for the tokens [start, stop), oldest first."""


class WindowState(TailState):
    """A sliding window that drops its first tokens, too (`keep` is 0)."""

    batchable = True
    layer: RotatingKVCache

    def __init__(self, layer: RotatingKVCache, ledger: Ledger) -> None:
        self._size: int = layer.max_size
        size = self._size  # a snapshot that held `self` would keep the layer alive
        super().__init__(layer, ledger, lambda at: max(0, at - size))

    def can_rewind(self, to: int) -> bool:
        return to == self.offset or 0 <= to < self.offset <= self._size

    def holds(self, at: int) -> bool:
        return super().holds(at) or self._spans(at)

    def can_revert(self, mark: Mark, to: int) -> bool:
        return super().can_revert(mark, to) or self._spans(to)

    def revert(self, mark: Mark, to: int) -> None:
        self._check_none_live()
        if super().can_revert(mark, to) or not self._spans(to):
            super().revert(mark, to)
            return
        end = self.layer._idx - (self.offset - to)
        begin = end - min(to, self._size)
        self._put([x[..., begin:end, :] for x in self.arrays()], to)

    def absorb(self, batch_cache: object, row: int, count: int) -> None:
        offset = self.offset + count
        if latest := cast("KVRows", batch_cache).latest(row, min(offset, self._size)):
            self._check_none_live()
            self._put([own(x) for x in latest], offset)

    def _go_back(self, to: int) -> None:
        self._put([x[..., :to, :] for x in self.arrays()], to)

    def _rewinds_after(self, count: int) -> bool:
        return self.offset + count <= self._size

    def _spans(self, to: int) -> bool:
        """Returns True if the buffers are in temporal order and hold all tokens needed at `to`."""
        ordered = bool(self.arrays()) and self.layer._idx == self.arrays()[0].shape[-2]
        return ordered and self.offset - self.layer._idx <= self.needs(to) and to <= self.offset

    def _put(self, buffers: Buffers, offset: int) -> None:
        self.layer.keys, self.layer.values = buffers if offset else (None, None)
        self.layer.offset = offset
        self.layer._idx = buffers[0].shape[-2] if offset else 0

    def _between(self, x: mx.array, start: int, stop: int) -> mx.array:
        idx, offset = self.layer._idx, self.layer.offset
        turn = offset - idx  # the token at the start of the buffer; older ones come after `_idx`
        newer = x[..., max(start, turn) - turn : max(stop, turn) - turn, :]
        if start >= turn:
            return newer
        # Cut before joining: so no array is larger than the result.
        oldest = offset - x.shape[-2]
        older = x[..., idx + start - oldest : idx + min(stop, turn) - oldest, :]
        return mx.concatenate([older, newer], axis=-2)


class ChunkState(TailState):
    """A layer with a chunk. It can go back to a token while it holds the chunk of that token from the chunk's start on.
    A forward drops the oldest tokens before it writes, but none of the chunk where the forward begins."""

    layer: ChunkedKVCache

    def __init__(self, layer: ChunkedKVCache, ledger: Ledger) -> None:
        size: int = layer.chunk_size
        # At the start of a chunk no token is needed, but the buffers must hold at least one.
        super().__init__(layer, ledger, lambda at: min(at // size * size, at - 1))

    def can_rewind(self, to: int) -> bool:
        return to == self.offset or (0 <= to < self.offset and max(0, self.needs(to)) >= self.layer.start_position)

    def holds(self, at: int) -> bool:
        return self.can_rewind(at)

    def _between(self, x: mx.array, start: int, stop: int) -> mx.array:
        first = self.layer.start_position
        return x[..., start - first : stop - first, :]

    def _go_back(self, to: int) -> None:
        self.layer.offset = to

    def _put(self, buffers: Buffers, offset: int) -> None:
        self.layer.keys, self.layer.values = buffers
        self.layer.offset = offset
        self.layer.start_position = offset - buffers[0].shape[-2]
