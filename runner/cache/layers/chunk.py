"""ChunkedKVCache (Llama 4): attention looks back to the start of the token's chunk, and no further.

Its front is dropped at the start of a forward, so that at most `chunk_size` tokens stay. Its `trim` and
`is_trimmable` know nothing of chunks.
"""

from functools import partial
from typing import Protocol

import mlx.core as mx

from runner.cache.interface import Miss
from runner.cache.layers.adapter import TailState
from runner.cache.layers.snapshot import Buffers, Ledger, Owned, own


class Chunked(Protocol):
    """The attributes of ChunkedKVCache that are read and set."""

    keys: mx.array | None
    values: mx.array | None
    offset: int
    chunk_size: int
    start_position: int


class ChunkState(TailState):
    """A chunk. It can go back as long as it still holds the tokens from the start of the target's chunk on."""

    layer: Chunked
    markable = True  # a forward cuts the front before it writes, and never into the chunk where it begins
    refusal = Miss.WINDOW_PASSED

    def __init__(self, layer: Chunked, ledger: Ledger) -> None:
        super().__init__(layer, ledger, partial(_needs, layer.chunk_size))

    @property
    def offset(self) -> int:
        return self.layer.offset

    def can_rewind(self, to: int) -> bool:
        return to == self.offset or (0 <= to < self.offset and max(0, self.needs(to)) >= self.layer.start_position)

    def copy(self, start: int, stop: int) -> Owned[Buffers]:
        low, high = start - self.layer.start_position, stop - self.layer.start_position
        entries = [own(x[..., low:high, :]) for x in self.arrays()]
        return Owned(entries, entries)

    def arrays(self) -> list[mx.array]:
        return [x for x in (self.layer.keys, self.layer.values) if x is not None]

    def _go_back(self, to: int) -> None:
        self.layer.offset = to

    def _put(self, buffers: Buffers, offset: int) -> None:
        self.layer.keys, self.layer.values = buffers
        self.layer.offset, self.layer.start_position = offset, offset - buffers[0].shape[-2]


def _needs(chunk_size: int, at: int) -> int:
    # At the start of a chunk nothing is needed; one token keeps the buffers there.
    return min(at // chunk_size * chunk_size, at - 1)
