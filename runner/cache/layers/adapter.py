"""What all adapters share: the object of mlx-lm that they adapt, and its snapshots."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import mlx.core as mx

from runner.cache.layer_interface import Copy, LayerState, Snapshot
from runner.cache.layers.snapshot import (
    Buffers,
    LayerSnapshot,
    Ledger,
    Owned,
    StateSnapshot,
    TailSnapshot,
    own,
)

Content = TypeVar("Content")


class LayerAdapter(LayerState, Generic[Content]):
    """Adapts one object of mlx-lm, given fresh."""

    counted = False

    def __init__(self, leaf: object, ledger: Ledger) -> None:
        """`ledger` counts the snapshots."""
        self.leaf = leaf
        self.ledger = ledger
        self.live: list[LayerSnapshot[Content]] = []
        self.fresh = copy.deepcopy(vars(leaf))

    @abstractmethod
    def copy(self, start: int, stop: int) -> Owned[Content]:
        """A copy of what it holds of the tokens [start, stop), not evaluated."""

    def advance(self, count: int) -> None:
        """Nothing: the object counts by itself."""

    def rewind(self, to: int) -> None:
        if not self.can_rewind(to):
            raise ValueError(f"{type(self).__name__} at {self.offset} tokens cannot go back to {to}")
        self._rewind(to)

    def reset(self) -> None:
        self._transplant(copy.deepcopy(self.fresh))

    def discard(self) -> None:
        self.live.clear()
        self.reset()

    def page_out(self) -> list[Copy]:
        return [self._copied(snapshot) for snapshot in self.live if self._endangered(snapshot)] if self.live else []

    @abstractmethod
    def _rewind(self, to: int) -> None: ...

    def _endangered(self, snapshot: Snapshot) -> bool:  # noqa: ARG002
        """Whether a write at the present offset would destroy it."""
        return True

    def _copied(self, snapshot: LayerSnapshot[Content]) -> Copy:
        owned = self.copy(snapshot.start, snapshot.stop)
        return Copy(owned.arrays, lambda: snapshot.page_out(owned))

    def _transplant(self, attributes: dict[str, object]) -> None:
        own = vars(self.leaf)
        own.clear()
        own.update(attributes)


class MovedState(LayerAdapter[Content]):
    """A layer whose live snapshots a move destroys."""

    def _rewind(self, to: int) -> None:
        if to != self.offset:
            self._check_none_live()
            self._go_back(to)

    def _go_back(self, to: int) -> None:
        """Moves to an earlier offset, which `can_rewind` allowed."""
        raise NotImplementedError

    def _check_none_live(self) -> None:
        if self.live:
            raise RuntimeError(f"{type(self).__name__} would destroy {len(self.live)} snapshots that are live in it")


class TailState(MovedState[Buffers]):
    """A layer that holds keys and values of the last tokens, as many as it may look back to."""

    def __init__(self, leaf: object, ledger: Ledger, needs: Callable[[int], int]) -> None:
        """`needs` goes into every snapshot, and must not hold on to the layer."""
        super().__init__(leaf, ledger)
        self._needs = needs

    def needs(self, at: int) -> int:
        return self._needs(at)

    def snapshot(self, start: int, stop: int) -> Snapshot | None:
        if not start < stop == self.offset:
            return None
        return TailSnapshot(max(start, self.needs(stop)), stop, self, self.ledger, needs=self._needs)

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
        # A copy, even of a single piece, and even without a gap: the snapshots stay as they are, wherever they live.
        buffers = [own(mx.concatenate([*same], axis=-2)) for same in zip(*pieces, strict=True)]
        mx.eval(buffers)
        self._put(buffers, stop)

    @abstractmethod
    def _put(self, buffers: Buffers, offset: int) -> None:
        """Makes these the live buffers; nobody else holds them."""


class CountedState(MovedState[Content]):
    """A state without a clock of its own: the tokens are counted here, and it stands where it stands."""

    whole = True
    counted = True

    def __init__(self, leaf: object, ledger: Ledger) -> None:
        super().__init__(leaf, ledger)
        self._offset = 0

    @property
    def offset(self) -> int:
        return self._offset

    def needs(self, at: int) -> int:
        return at - 1

    def advance(self, count: int) -> None:
        self._offset += count

    def can_rewind(self, to: int) -> bool:
        return to == self._offset

    def reset(self) -> None:
        super().reset()
        self._offset = 0

    def snapshot(self, start: int, stop: int) -> Snapshot | None:
        return StateSnapshot(stop - 1, stop, self, self.ledger) if start < stop == self._offset else None

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        snapshot = snapshots[-1]
        if not isinstance(snapshot, StateSnapshot):
            raise TypeError(f"{type(self).__name__} made no {type(snapshot).__name__}")
        self._check_none_live()
        if snapshot.live:  # in another layer, where it stays
            self._set(snapshot.copied().content)
        else:
            self._set(snapshot.content)
            snapshot.page_in(self)
        self._offset = snapshot.stop

    @abstractmethod
    def _set(self, content: Content) -> None:
        """Makes `content` what the object holds; nobody else holds it any more."""
