"""A segment that is being copied out of the layers. Owner: the engine thread.

Copying stops after every piece of a layer, so that a slice can come between. What was copied stays right whatever
happens to the layers meanwhile: it is of the same tokens as long as the node holds the same snapshot.
"""

from mmap import mmap
from typing import NamedTuple

from runner.cache.disk.name import Name
from runner.cache.disk.point import Tokens
from runner.cache.disk.segment import Facts, Record, Segment
from runner.cache.layer_interface import Snapshot
from runner.cache.layers.cargo import PIECE_BYTES, copy_piece, copy_tokens, parts
from runner.cache.node import Node


class Source(NamedTuple):
    """A record to copy: a snapshot, as long as the node holds it."""

    slot: int
    snapshot: Snapshot
    live: bool
    start: int
    record: Record


class Load:
    """A segment that is being copied, a piece at a time."""

    def __init__(
        self, node: Node, facts: Facts, sources: list[Source], tokens: Tokens, buffer: mmap, *, on_device: bool
    ) -> None:
        """`buffer` is large enough."""
        self.node, self.buffer = node, buffer
        self._facts, self._sources, self._on_device = facts, sources, on_device
        self._data = memoryview(buffer)[: sum(facts.sizes)]
        self._at = 4 * facts.tokens
        self._data[: self._at] = tokens.tobytes()
        self._done = 0
        self._copied = 0  # of the present layer: tokens or, of a state, bytes

    @property
    def name(self) -> Name:
        """The name of the segment."""
        return self._facts.name

    @property
    def tokens(self) -> int:
        """The number of its tokens; those of a tail or a state are not repeated."""
        return self._facts.tokens

    @property
    def segment(self) -> Segment | None:
        """The segment, once all of it is copied."""
        return Segment(self._facts, self._data) if self._done == len(self._sources) else None

    def advance(self) -> bool:
        """Copies the next piece of a layer. Returns False if it is no longer there: the load is to be dropped."""
        slot, snapshot, live, _, record = source = self._sources[self._done]
        slots = self.node.slots
        if slot >= len(slots) or slots[slot] is not snapshot or snapshot.live != live:
            return False
        total = self._advance_state(source) if record.content else self._advance_tokens(source)
        if total is None:
            return False
        if self._copied >= total:
            self._at += _bytes_of(record)
            self._done, self._copied = self._done + 1, 0
        return True

    def _advance_tokens(self, source: Source) -> int | None:
        """Copies some tokens of a layer. Returns how many it has; None if it has changed."""
        start, tensors = source.start, source.record.tensors
        count = self._facts.name.stop - start
        first = self._copied
        stop = min(count, first + max(1, PIECE_BYTES * count // max(1, _bytes_of(source.record))))
        found, _ = parts(source.snapshot, start + first, start + stop)
        shapes = [(each.dtype, (*each.shape[:-2], stop - first, each.shape[-1])) for each in tensors]
        if [(part.dtype, part.shape) for part in found] != shapes:
            return None
        at = self._at
        for part, tensor in zip(found, tensors, strict=True):
            into = self._data[at : at + tensor.nbytes]
            copy_tokens(part, into, first, count, on_device=self._on_device)
            at += tensor.nbytes
        self._copied = stop
        return count

    def _advance_state(self, source: Source) -> int | None:
        """Copies some bytes of a state. Returns how many it has; None if it has changed."""
        record = source.record
        found, content = parts(source.snapshot, source.start, self._facts.name.stop)
        shapes = [(each.dtype, each.shape) for each in record.tensors]
        if content != record.content or [(part.dtype, part.shape) for part in found] != shapes:
            return None
        begin = 0
        for part, tensor in zip(found, record.tensors, strict=True):
            end = begin + tensor.nbytes
            if self._copied < end:
                into = self._data[self._at + begin : self._at + end]
                self._copied = begin + copy_piece(part.array, into, self._copied - begin, on_device=self._on_device)
                break
            begin = end
        return _bytes_of(record)


def _bytes_of(record: Record) -> int:
    return sum(tensor.nbytes for tensor in record.tensors)
