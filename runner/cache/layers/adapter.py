"""The base classes of the adapters: each wraps one layer cache of mlx-lm and knows its snapshots."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import mlx.core as mx

from runner.cache.layer_interface import Copy, LayerState, Mark, Snapshot
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
    """Adapts one layer cache of mlx-lm, given fresh."""

    counted = False

    def __init__(self, layer: object, ledger: Ledger) -> None:
        """`ledger` counts its snapshots."""
        self.layer = layer
        self.ledger = ledger
        self.live: list[LayerSnapshot[Content]] = []
        self.fresh = copy.deepcopy(vars(layer))

    @abstractmethod
    def copy(self, start: int, stop: int) -> Owned[Content]:
        """Returns a copy of what the layer holds of the tokens [start, stop), not evaluated."""

    def adopted(self, start: int, stop: int, owned: Owned[Content]) -> Snapshot:  # noqa: ARG002
        """Returns a snapshot of the tokens [start, stop) that another process has made."""
        raise TypeError(f"{type(self).__name__} adopts nothing")

    def advance(self, count: int) -> None:
        """Does nothing: the layer counts by itself."""

    def rewind(self, to: int) -> None:
        if not self.can_rewind(to):
            raise ValueError(f"{type(self).__name__} at {self.offset} tokens cannot go back to {to}")
        self._rewind(to)

    def mark(self, count: int) -> Mark:
        if not self.markable:
            raise TypeError(f"{type(self).__name__} takes no marks")
        return Mark(self.offset) if self._rewinds_after(count) else Mark(self.offset, self._held(), self.nbytes)

    def can_revert(self, mark: Mark, to: int) -> bool:
        return to == mark.offset if mark.attributes is not None and to != self.offset else self.can_rewind(to)

    def revert(self, mark: Mark, to: int) -> None:
        if mark.attributes is not None and to == mark.offset:
            self._transplant(mark.attributes)
        else:
            self.rewind(to)

    def reset(self) -> None:
        self._transplant(copy.deepcopy(self.fresh))

    def discard(self) -> None:
        self.live.clear()
        self.reset()

    def page_out(self) -> list[Copy]:
        return [self._copied(snapshot) for snapshot in self.live if self._endangered(snapshot)] if self.live else []

    @abstractmethod
    def _rewind(self, to: int) -> None: ...

    def _rewinds_after(self, count: int) -> bool:  # noqa: ARG002
        """Returns True if the layer will be able to rewind to where it stands now after a forward over `count`
        tokens."""
        return True

    def _held(self) -> dict[str, object]:
        """Returns the present attributes. Of a list its items: the layer puts new ones into its own."""
        return {name: [*value] if isinstance(value, list) else value for name, value in vars(self.layer).items()}

    def _endangered(self, snapshot: Snapshot) -> bool:  # noqa: ARG002
        """Returns True if a write at the present offset would destroy the snapshot."""
        return True

    def _copied(self, snapshot: LayerSnapshot[Content]) -> Copy:
        owned = self.copy(snapshot.start, snapshot.stop)
        return Copy(owned.arrays, lambda: snapshot.page_out(owned))

    def _transplant(self, attributes: dict[str, object]) -> None:
        own = vars(self.layer)
        own.clear()
        own.update(attributes)


class MovedState(LayerAdapter[Content]):
    """A layer whose live snapshots are destroyed when it moves."""

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
    """A layer with keys and values of the last tokens, as far back as it may look."""

    def __init__(self, layer: object, ledger: Ledger, needs: Callable[[int], int]) -> None:
        """Every snapshot holds `needs`, which must not refer to the layer."""
        super().__init__(layer, ledger)
        self._needs = needs

    def needs(self, at: int) -> int:
        return self._needs(at)

    def adopted(self, start: int, stop: int, owned: Owned[Buffers]) -> Snapshot:
        return TailSnapshot(start, stop, None, self.ledger, owned, needs=self._needs)

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
        # Always a copy, even of a single piece: the snapshots stay as they are, wherever they live.
        buffers = [own(mx.concatenate([*same], axis=-2)) for same in zip(*pieces, strict=True)]
        mx.eval(buffers)
        self._put(buffers, stop)

    @abstractmethod
    def _put(self, buffers: Buffers, offset: int) -> None:
        """Makes these the live buffers; no other object holds them."""


class CountedState(MovedState[Content]):
    """A state without an offset of its own: the adapter counts the tokens, and the state cannot move."""

    whole = True
    counted = True

    def __init__(self, layer: object, ledger: Ledger) -> None:
        super().__init__(layer, ledger)
        self._offset = 0

    @property
    def offset(self) -> int:
        return self._offset

    def needs(self, at: int) -> int:
        return at - 1

    @property
    def content(self) -> Content:
        """The present state, not copied."""
        raise TypeError(f"{type(self).__name__} shows no state")

    def adopted(self, start: int, stop: int, owned: Owned[Content]) -> Snapshot:  # noqa: ARG002  a state has no start
        return StateSnapshot(stop - 1, stop, None, self.ledger, owned)

    def advance(self, count: int) -> None:
        self._offset += count

    def can_rewind(self, to: int) -> bool:
        return to == self._offset

    def revert(self, mark: Mark, to: int) -> None:
        self._check_none_live()
        super().revert(mark, to)
        self._offset = to

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
        if snapshot.live:  # in another layer, and stays there
            self._set(snapshot.copied().content)
        else:
            self._set(snapshot.content)
            snapshot.page_in(self)
        self._offset = snapshot.stop

    def _rewinds_after(self, count: int) -> bool:  # noqa: ARG002
        return False

    @abstractmethod
    def _set(self, content: Content) -> None:
        """Makes `content` the state of the layer; no other object holds it."""
