"""ChunkedKVCache (Llama 4): attention looks back to the start of the token's chunk, and no further.

Its front is dropped at the start of a forward, so that at most `chunk_size` tokens stay. Its `trim` and
`is_trimmable` know nothing of chunks.
"""

from typing import Protocol

import mlx.core as mx

from runner.cache.interface import Miss, Snapshot
from runner.cache.layers.leaf import WholeState
from runner.cache.layers.snapshot import OwnedSnapshot, own

Chunk = list[mx.array]  # keys and values of the last tokens up to the offset, at most chunk_size


class Chunked(Protocol):
    """What of ChunkedKVCache is read and set."""

    keys: mx.array | None
    values: mx.array | None
    offset: int
    chunk_size: int
    start_position: int


class ChunkState(WholeState[Chunk]):
    """The chunk: goes back as long as the tokens from the start of the chunk on are still there."""

    leaf: Chunked
    refusal = Miss.WINDOW_PASSED

    @property
    def offset(self) -> int:
        return self.leaf.offset

    def rewind(self, to: int) -> bool:
        if to == self.offset:
            return True
        if not 0 <= to < self.offset or self._chunk_start(to) < self.leaf.start_position:
            return False
        self.leaf.offset = to
        return True

    def snapshot(self, start: int) -> Snapshot | None:
        stop = self.offset
        if stop <= start:
            return None
        leaf = self.leaf
        low, high = max(0, stop - leaf.chunk_size - leaf.start_position), stop - leaf.start_position
        chunk = [own(x[..., low:high, :]) for x in self.arrays()]
        return OwnedSnapshot(start, stop, chunk, chunk)

    def restore(self, snapshot: Snapshot, to: int) -> bool:
        chunk, stop = self._opened(snapshot), snapshot.stop
        front = stop - chunk[0].shape[-2]
        if to != stop and not (to < stop and self._chunk_start(to) >= front):
            return False
        self.leaf.keys, self.leaf.values = (own(x) for x in chunk)
        self.leaf.offset, self.leaf.start_position = to, front
        return True

    def arrays(self) -> list[mx.array]:
        return [x for x in (self.leaf.keys, self.leaf.values) if x is not None]

    def _chunk_start(self, offset: int) -> int:
        return offset // self.leaf.chunk_size * self.leaf.chunk_size
