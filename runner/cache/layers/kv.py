"""KVCache, HadamardKVCache and ConcatenateKVCache: keys and values per token, in buffers to which layers only append.

Multi-head latent attention uses the same classes with other widths.
"""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import ConcatenateKVCache, KVCache

from runner.cache.layer_interface import Miss, Snapshot
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.rows import KVRows
from runner.cache.layers.snapshot import Buffers, Owned, SliceSnapshot, complete, own

STEP = 256  # tokens by which the buffers of mlx-lm's own classes grow
_ROOM_STEP = 64  # after a restore, a smaller step: clearing 256 places takes longer than a token of a small model


def spare_room(tokens: int) -> int:
    """Returns the most room, in tokens, that a buffer with `tokens` tokens keeps. A buffer with more is replaced."""
    return max(STEP, tokens // 10)


class KVState(LayerState):
    """A sliceable layer. Beyond `offset` its buffers have room with stale tokens or zeros. A rewind only lowers the
    offset: the tokens beyond the offset stay readable until the next write."""

    sliceable = True
    markable = True
    refusal = Miss.LOST
    kind = SliceSnapshot
    layer: KVCache | ConcatenateKVCache
    _step = _ROOM_STEP

    @property
    def offset(self) -> int:
        return self.layer.offset

    @staticmethod
    def needs(at: int) -> int:  # noqa: ARG004
        return 0

    def can_rewind(self, to: int) -> bool:
        return 0 <= to <= self.offset

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        at = self.offset
        missing: list[SliceSnapshot] = []
        for snapshot in snapshots:
            if not isinstance(snapshot, SliceSnapshot):
                raise TypeError(f"{type(self).__name__} made no {type(snapshot).__name__}")
            if snapshot.start != at:
                raise ValueError(f"a layer at {at} tokens cannot go on with {snapshot.start}..{snapshot.stop}")
            at = snapshot.stop
            if missing or snapshot not in self.live:
                missing.append(snapshot)
            else:
                self.layer.offset = at  # the snapshot is still in the buffers, after the offset
        if missing:
            self._write(missing)
            self.layer.offset = at

    def copy_tokens(self, start: int, stop: int) -> Owned:
        buffers = [own(x[..., start:stop, :]) for x in self.arrays()]
        return Owned(buffers, buffers)

    def trim(self, room: int) -> None:
        buffers, used = self.arrays(), self.offset
        if buffers and buffers[0].shape[-2] - used > room:
            # Room up to the next step stays: otherwise the next write would copy the whole buffer again.
            stop = used + min(room, -used % self._step)
            self._put([own(x[..., :stop, :]) for x in buffers])

    def arrays(self) -> list[mx.array]:
        return [*_flat(self.layer.keys), *_flat(self.layer.values)]

    def _go_back(self, to: int) -> None:
        self.layer.offset = to

    def _endangered(self, snapshot: Snapshot) -> bool:
        return snapshot.stop > self.offset

    def _write(self, snapshots: list[SliceSnapshot]) -> None:
        """Writes snapshots into the buffers, from the offset on. Snapshots with bytes of their own become live here;
        snapshots that are live in other layers are copied."""
        parts = [list(same) for same in zip(*(each.parts(each.start, each.stop) for each in snapshots), strict=True)]
        self._put(self._appended(parts, snapshots[-1].stop))
        for snapshot in snapshots:
            if not snapshot.live:
                snapshot.page_in(self)

    def _appended(self, parts: Sequence[Sequence[mx.array]], to: int) -> list[mx.array]:
        """Returns buffers with the entries in `parts` from the offset up to `to` (lazy). `parts` has a list of pieces
        for each buffer. The result is the layer's own buffers if they have room."""
        at, buffers = self.offset, self.arrays()
        if buffers and to <= buffers[0].shape[-2] <= to + spare_room(to):
            for buffer, pieces in zip(buffers, parts, strict=True):
                buffer[..., at:to, :] = pieces[0] if len(pieces) == 1 else mx.concatenate([*pieces], axis=-2)
            return buffers
        # The buffer is too small, or it is from a much longer conversation.
        before = [[x[..., :at, :]] if at else [] for x in buffers] or [[] for _ in parts]
        grown = list[mx.array]()
        for old, pieces in zip(before, parts, strict=True):
            room = mx.zeros((*pieces[0].shape[:-2], -to % self._step, pieces[0].shape[-1]), pieces[0].dtype)
            grown.append(mx.concatenate([*old, *pieces, room], axis=-2))
        return grown

    def _put(self, buffers: Buffers) -> None:
        half = len(buffers) // 2
        keys, values = buffers[:half], buffers[half:]
        self.layer.keys, self.layer.values = (keys[0], values[0]) if half == 1 else (keys, values)


class PlainKVState(KVState):
    """KVCache."""

    batchable = True

    def absorb(self, batch_cache: object, row: int, count: int) -> None:
        if latest := cast("KVRows", batch_cache).latest(row, count):
            self._put(self._appended([[x] for x in latest], self.offset + count))
            self.layer.offset += count


class ExactKVState(KVState):
    """ConcatenateKVCache: the buffers have no room, and every append replaces them. An append keeps entries beyond the
    offset, so a rewind cuts these off."""

    _step = 1

    def _go_back(self, to: int) -> None:
        self.layer.offset = to
        complete(self.page_out())
        self._put([own(x[..., :to, :]) for x in self.arrays()])


def _flat(buffers: mx.array | Sequence[mx.array] | None) -> Buffers:
    if buffers is None:
        return []
    return [buffers] if isinstance(buffers, mx.array) else list(buffers)
