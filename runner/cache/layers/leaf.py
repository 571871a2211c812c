"""What all adapters share: the object of mlx-lm that they adapt, and how a snapshot of a whole state behaves."""

import copy
from abc import abstractmethod
from typing import Generic, TypeVar

import mlx.core as mx

from runner.cache.interface import LayerState, Snapshot
from runner.cache.layers.snapshot import OwnedSnapshot

Content = TypeVar("Content")


class LeafState(LayerState, Generic[Content]):
    """Adapts one object of mlx-lm, given fresh."""

    def __init__(self, leaf: object) -> None:
        self.leaf = leaf
        self.fresh = copy.deepcopy(vars(leaf))

    def advance(self, count: int) -> None:
        """Nothing: the object counts by itself."""

    def reset(self) -> None:
        self._transplant(copy.deepcopy(self.fresh))

    def _transplant(self, attributes: dict[str, object]) -> None:
        own = vars(self.leaf)
        own.clear()
        own.update(attributes)

    def _opened(self, snapshot: Snapshot) -> Content:
        if not isinstance(snapshot, OwnedSnapshot):
            raise TypeError(f"{type(self).__name__} made no {type(snapshot).__name__}")
        content: Content = snapshot.content
        return content


class WholeState(LeafState[Content]):
    """A layer of which only the state at one offset means something."""

    def split(self, snapshot: Snapshot, at: int) -> tuple[Snapshot | None, Snapshot]:
        check_cut(snapshot, at)
        snapshot.start = at
        return None, snapshot

    def merge(self, first: Snapshot | None, second: Snapshot | None) -> Snapshot | None:
        check_meet(first, second)
        if first is not None:
            if second is not None:
                second.start = first.start
            first.close()
        return second


class CountedState(WholeState[Content]):
    """A whole state without a clock of its own: the tokens are counted here, and it stands where it stands."""

    def __init__(self, leaf: object) -> None:
        super().__init__(leaf)
        self._offset = 0

    @property
    def offset(self) -> int:
        return self._offset

    def advance(self, count: int) -> None:
        self._offset += count

    def rewind(self, to: int) -> bool:
        return to == self._offset

    def reset(self) -> None:
        super().reset()
        self._offset = 0

    def snapshot(self, start: int) -> Snapshot | None:
        if self._offset <= start:
            return None
        content, arrays = self._copy()
        return OwnedSnapshot(start, self._offset, content, arrays)

    def restore(self, snapshot: Snapshot, to: int) -> bool:
        content = self._opened(snapshot)
        if to != snapshot.stop:
            return False
        self._put(content)
        self._offset = to
        return True

    @abstractmethod
    def _copy(self) -> tuple[Content, list[mx.array]]:
        """An owned copy of the state, and the arrays within it."""

    @abstractmethod
    def _put(self, content: Content) -> None:
        """Makes a copy of `content` the live state."""


def check_cut(snapshot: Snapshot, at: int) -> None:
    """Raises ValueError unless `at` lies strictly within the snapshot."""
    if not snapshot.start < at < snapshot.stop:
        raise ValueError(f"cannot cut tokens {snapshot.start}..{snapshot.stop} at {at}")


def check_meet(first: Snapshot | None, second: Snapshot | None) -> None:
    """Raises ValueError unless the second snapshot, if both are there, begins where the first one ends."""
    if first is not None and second is not None and first.stop != second.start:
        raise ValueError(f"tokens {first.start}..{first.stop} and {second.start}..{second.stop} do not meet")
