"""KVCache and QuantizedKVCache: keys and values per token, in buffers that are only ever appended to.

Multi-head latent attention uses the same class with other widths.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from runner.cache.interface import Snapshot
from runner.cache.layers.leaf import LeafState, check_cut, check_meet
from runner.cache.layers.snapshot import OwnedSnapshot, own

Buffers = list[mx.array]  # keys then values, [B, H, L, D] each; a quantized cache has three of both


class Appended(Protocol):
    """What the two classes have in common."""

    keys: mx.array | Sequence[mx.array] | None
    values: mx.array | Sequence[mx.array] | None
    offset: int
    step: int


class KVState(LeafState[Buffers]):
    """The sliceable layer. Buffers have room behind `offset`, full of stale tokens or zeros."""

    leaf: Appended

    @property
    def offset(self) -> int:
        return self.leaf.offset

    def rewind(self, to: int) -> bool:
        if not 0 <= to <= self.offset:
            return False
        self.leaf.offset = to
        return True

    def snapshot(self, start: int) -> Snapshot | None:
        stop = self.offset
        if stop <= start:
            return None
        return _owned(start, stop, [own(x[..., start:stop, :]) for x in self.arrays()])

    def restore(self, snapshot: Snapshot, to: int) -> bool:
        parts = self._opened(snapshot)
        start = snapshot.start
        if not start <= to <= snapshot.stop or self.offset < start:
            return False
        live: list[mx.array | None] = [*self.arrays()] or [None] * len(parts)
        self._put([self._store(x, part[..., : to - start, :], start) for x, part in zip(live, parts, strict=True)])
        self.leaf.offset = to
        return True

    def split(self, snapshot: Snapshot, at: int) -> tuple[Snapshot | None, Snapshot]:
        check_cut(snapshot, at)
        parts, cut = self._opened(snapshot), at - snapshot.start
        first = _owned(snapshot.start, at, [own(x[..., :cut, :]) for x in parts])
        second = _owned(at, snapshot.stop, [own(x[..., cut:, :]) for x in parts])
        snapshot.close()
        return first, second

    def merge(self, first: Snapshot | None, second: Snapshot | None) -> Snapshot | None:
        check_meet(first, second)
        merged = None
        if first is not None and second is not None:
            pairs = zip(self._opened(first), self._opened(second), strict=True)
            merged = _owned(first.start, second.stop, [mx.concatenate([a, b], axis=-2) for a, b in pairs])
        for snapshot in (first, second):
            if snapshot is not None:
                snapshot.close()
        return merged

    def arrays(self) -> list[mx.array]:
        return [*_flat(self.leaf.keys), *_flat(self.leaf.values)]

    def _put(self, buffers: Buffers) -> None:
        half = len(buffers) // 2
        keys, values = buffers[:half], buffers[half:]
        self.leaf.keys, self.leaf.values = (keys[0], values[0]) if half == 1 else (keys, values)

    def _store(self, live: mx.array | None, part: mx.array, start: int) -> mx.array:
        """The live buffer with `part` written at `start`: in place where it fits, else a larger one."""
        to = start + part.shape[-2]
        if live is not None and to <= live.shape[-2]:
            live[..., start:to, :] = part
            return live
        room = mx.zeros((*part.shape[:-2], self.leaf.step - to % self.leaf.step, part.shape[-1]), part.dtype)
        before = [live[..., :start, :]] if live is not None else []
        return mx.concatenate([*before, part, room], axis=-2)


def _flat(buffers: mx.array | Sequence[mx.array] | None) -> Buffers:
    if buffers is None:
        return []
    return [buffers] if isinstance(buffers, mx.array) else list(buffers)


def _owned(start: int, stop: int, buffers: Buffers) -> Snapshot:
    return OwnedSnapshot(start, stop, buffers, buffers)
