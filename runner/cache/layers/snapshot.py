"""Copies that own their bytes."""

from collections.abc import Iterable
from typing import Generic, TypeVar

import mlx.core as mx

from runner.cache.interface import Snapshot

Content = TypeVar("Content")


def own(x: mx.array) -> mx.array:
    """A copy of `x` that keeps no other buffer alive (lazy).

    A slice, a deep copy, and even `mx.contiguous` of something already contiguous share the buffer they came from,
    whatever its size; `mx.array` of an array copies, but strided ones keep their layout without `contiguous`.
    """
    return mx.array(mx.contiguous(x))


class OwnedSnapshot(Snapshot, Generic[Content]):
    """Some content that owns its bytes, evaluated: an unevaluated copy would hold the live buffer and make the next
    write into that copy all of it."""

    def __init__(self, start: int, stop: int, content: Content, arrays: Iterable[mx.array]) -> None:
        """`arrays` are those within `content`."""
        held = list(arrays)
        mx.eval(held)
        self.start = start
        self.stop = stop
        self.nbytes = sum(array.nbytes for array in held)
        self._content: Content | None = content

    @property
    def content(self) -> Content:
        """What was copied. Raises RuntimeError when closed."""
        if self._content is None:
            raise RuntimeError(f"the snapshot of tokens {self.start}..{self.stop} is closed")
        return self._content

    def close(self) -> None:
        if self._content is None:
            raise RuntimeError(f"the snapshot of tokens {self.start}..{self.stop} was closed before")
        self._content = None
        self.nbytes = 0
