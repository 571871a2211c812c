"""The base of the adapters: each wraps one layer cache of mlx-lm and knows its snapshots."""

import copy
from abc import abstractmethod
from typing import Generic

from runner.cache.layer_interface import Copy, LayerState, Mark, Snapshot
from runner.cache.layers.snapshot import Content, LayerSnapshot, Ledger, Owned


class LayerAdapter(LayerState, Generic[Content]):
    """Adapts one layer cache of mlx-lm, given fresh."""

    counted = False

    def __init__(self, layer: object, ledger: Ledger) -> None:
        """`ledger` counts its snapshots."""
        self.layer = layer
        self.ledger = ledger
        self.live: list[LayerSnapshot[Content]] = []
        self.fresh = copy.deepcopy(vars(layer))

    # --- what every class does in its own way, beside the methods of LayerState

    @abstractmethod
    def copy(self, start: int, stop: int) -> Owned[Content]:
        """Returns a copy of what the layer holds of the tokens [start, stop), not evaluated."""

    def restored_snapshot(self, start: int, stop: int, owned: Owned[Content]) -> Snapshot:  # noqa: ARG002
        """Returns a snapshot of the tokens [start, stop) that another process has made."""
        raise TypeError(f"{type(self).__name__} restores nothing")

    def _go_back(self, to: int) -> None:
        """Moves to an earlier offset, which `can_rewind` allowed. No snapshot of a layer that is not sliceable is
        live."""
        raise NotImplementedError

    def _rewinds_after(self, count: int) -> bool:  # noqa: ARG002
        """Returns True if the layer will be able to rewind to where it stands now after a forward over `count`
        tokens."""
        return True

    def _endangered(self, snapshot: Snapshot) -> bool:  # noqa: ARG002
        """Returns True if a write at the present offset would destroy the snapshot."""
        return True

    # --- what they have in common

    def advance(self, count: int) -> None:
        """Does nothing: the layer counts by itself."""

    def rewind(self, to: int) -> None:
        if not self.can_rewind(to):
            raise ValueError(f"{type(self).__name__} at {self.offset} tokens cannot go back to {to}")
        if to != self.offset:
            if not self.sliceable:
                self._check_none_live()
            self._go_back(to)

    def mark(self, count: int) -> Mark:
        if not self.markable:
            raise TypeError(f"{type(self).__name__} takes no marks")
        if self._rewinds_after(count):
            return Mark(self.offset)
        # Of a list its items: the layer puts new ones into its own.
        held = {name: [*value] if isinstance(value, list) else value for name, value in vars(self.layer).items()}
        return Mark(self.offset, held)

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

    def _copied(self, snapshot: LayerSnapshot[Content]) -> Copy:
        owned = self.copy(snapshot.start, snapshot.stop)
        return Copy(owned.arrays, lambda: snapshot.page_out(owned))

    def _check_none_live(self) -> None:
        if self.live:
            raise RuntimeError(f"{type(self).__name__} would destroy {len(self.live)} snapshots that are live in it")

    def _transplant(self, attributes: dict[str, object]) -> None:
        own = vars(self.layer)
        own.clear()
        own.update(attributes)
