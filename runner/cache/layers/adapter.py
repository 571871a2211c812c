"""The base of the adapters: methods with the same meaning for every layer cache of mlx-lm."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from runner.cache.layer_interface import Miss, Snapshot
from runner.cache.layers.scans import StateReads
from runner.cache.layers.snapshot import Copy, LayerSnapshot, Ledger, Owned


class Mark(NamedTuple):
    """The offset of one layer before a round, and the means to go back there."""

    offset: int
    """The number of tokens that the layer had seen."""
    attributes: dict[str, object] | None = None
    """The layer's attributes at this offset; None if the layer can rewind there without them."""
    reads: StateReads | None = None
    """The reads of the layer in the round; with them the layer can perhaps stand after any token of the round."""


class LayerState(ABC):
    """One layer cache of a model.

    A layer is *sliceable* (keys and values per token; it can go back to any token), or it has a *tail* (keys and values
    of the last tokens: a window, a chunk), or it has a *state* that is valid at one offset only (recurrent or unknown).
    Page out the live snapshots of a layer that is not sliceable before the layer moves.
    """

    sliceable = False
    whole = False
    """True for a layer with a state: its size does not grow with the tokens, and it has no offset of its own. Call
    `count_tokens` after each forward."""
    batchable = False
    """True if layers of this class can be joined into a batch."""
    markable = False
    """True if the layer can go back after a round, by `mark`, `can_revert` and `revert`; and if it `holds`, after a
    forward, the tokens inside the forward for which `watch` was called."""
    refusal = Miss.NON_TRIMMABLE
    """The reason for the log if the layer cannot go back."""
    kind: type[LayerSnapshot]
    needs: Callable[[int], int]
    """Returns the first token that a layer must hold to stand at an offset above 0: for a state, the last token before
    it. The function must not refer to the layer, since snapshots keep it."""

    def __init__(self, layer: object, ledger: Ledger) -> None:
        """`layer` must be fresh. `ledger` counts its snapshots."""
        self.layer = layer
        self.ledger = ledger
        self.live: list[LayerSnapshot] = []
        """The snapshots whose bytes are in the buffers of the layer."""
        self.fresh = copy.deepcopy(vars(layer))

    @property
    @abstractmethod
    def offset(self) -> int:
        """The number of tokens that the layer has seen."""

    def holds(self, at: int) -> bool:
        """Returns True if `snapshot` can return a snapshot up to `at`: for a layer that is not sliceable, the offset
        and perhaps offsets in the last forward."""
        return at == self.offset or (self.sliceable and 0 <= at < self.offset)

    def watch(self, count: int, stops: Sequence[int]) -> StateReads | None:  # noqa: ARG002
        """Prepares the layer for a forward over `count` tokens, after which it shall hold the tokens `stops` of this
        forward. Returns the reads to watch; None if the layer holds them anyway."""
        return None

    def count_tokens(self, count: int) -> None:  # noqa: B027  most layers count tokens by themselves
        """Notes a forward over `count` tokens. Called only for a layer with a state."""

    @abstractmethod
    def can_rewind(self, to: int) -> bool:
        """Returns True if the layer can go back to `to` tokens without a snapshot."""

    def rewind(self, to: int) -> None:
        """Goes back to `to` tokens. Raises ValueError if the layer cannot rewind there."""
        if not self.can_rewind(to):
            raise ValueError(f"{type(self).__name__} at {self.offset} tokens cannot go back to {to}")
        if to != self.offset:
            if not self.sliceable:
                self._check_none_live()
            self._go_back(to)

    def _go_back(self, to: int) -> None:
        """Moves to the earlier offset `to`. `can_rewind(to)` must have returned True."""
        raise NotImplementedError

    def reset(self) -> None:
        """Empties the layer, in the same object, since a model may refer to it. It must have no live snapshots."""
        self._transplant(copy.deepcopy(self.fresh))

    def discard(self) -> None:
        """Resets the layer and loses its live snapshots, even if nodes still hold them."""
        self.live.clear()
        self.reset()

    def mark(self, count: int) -> Mark:
        """Returns a mark for a forward over the next `count` tokens. `count` must be at least 2: a forward over one
        token may write into the arrays that the mark holds. Raises TypeError unless the layer is `markable`. The mark
        of a layer that can rewind holds no arrays: MLX would have to copy them in every forward."""
        if not self.markable:
            raise TypeError(f"{type(self).__name__} takes no marks")
        if self._rewinds_after(count):
            return Mark(self.offset)
        # Lists are copied, since the layer replaces items of its own lists.
        held = {name: [*value] if isinstance(value, list) else value for name, value in vars(self.layer).items()}
        return Mark(self.offset, held)

    def _rewinds_after(self, count: int) -> bool:  # noqa: ARG002
        """Returns True if the layer can rewind to its present offset after a forward over `count` tokens."""
        return True

    def can_revert(self, mark: Mark, to: int) -> bool:
        """Returns True if the layer can go back to `to` tokens after the forward that followed the mark. Every layer
        can go back to the mark, and some layers to tokens after it."""
        return to == mark.offset if mark.attributes is not None and to != self.offset else self.can_rewind(to)

    def revert(self, mark: Mark, to: int) -> None:
        """Goes back to `to` tokens, and uses up the mark. Raises ValueError if the layer cannot stand there."""
        if mark.attributes is not None and to == mark.offset:
            self._transplant(mark.attributes)
        else:
            self.rewind(to)

    def snapshot(self, start: int, stop: int) -> Snapshot | None:
        """Returns a live snapshot of the tokens [start, stop), without tokens before `needs(stop)`. Returns None if
        start >= stop, and unless the layer `holds` these tokens."""
        if start < stop and self.holds(stop):
            return self.kind(max(start, self.needs(stop)), stop, self, self.ledger, None, self.needs)
        return None

    @abstractmethod
    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        """Brings the layer to the end of the last snapshot.

        A sliceable layer needs adjacent snapshots from its offset on. Their bytes move into the layer, where the
        snapshots are live from then on. A layer with a tail copies its tokens; a state moves into the layer. Snapshots
        that are live in another layer are copied, and stay there. Before, the caller pages out what would be
        overwritten; afterwards, it evaluates the layer's arrays. Raises ValueError if the snapshots do not fit.
        """

    def restored_snapshot(self, start: int, stop: int, owned: Owned) -> Snapshot:
        """Returns a snapshot of the tokens [start, stop) with bytes from the disk."""
        return self.kind(stop - 1 if self.whole else start, stop, None, self.ledger, owned, self.needs)

    @abstractmethod
    def copy_tokens(self, start: int, stop: int) -> Owned:
        """Returns a copy of the layer's content for the tokens [start, stop), not evaluated."""

    def page_out(self) -> list[Copy]:
        """Returns copies of all live snapshots that a write at the present offset would destroy. The caller must
        `complete` these copies before the write."""
        return [Copy(each, self.copy_tokens(each.start, each.stop)) for each in self.live if self._endangered(each)]

    def _endangered(self, snapshot: Snapshot) -> bool:  # noqa: ARG002
        """Returns True if a write at the present offset would destroy the snapshot."""
        return True

    def _check_none_live(self) -> None:
        if self.live:
            raise RuntimeError(f"{type(self).__name__} would destroy {len(self.live)} snapshots that are live in it")

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """Returns the arrays that the layer holds at its offset."""

    def passed_arrays(self) -> list[mx.array]:
        """Returns the arrays that the layer holds for tokens in the last forward only."""
        return []

    @property
    def empty(self) -> bool:
        """True if the layer holds no array: the layer is fresh, or the model does not use it."""
        return not self.arrays()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, including room for later tokens."""
        return sum(array.nbytes for array in self.arrays())

    @property
    def point_bytes(self) -> int:
        """Bytes of a snapshot of a layer with a tail or a state."""
        return self.nbytes

    def absorb(self, batch_cache: object, row: int, count: int) -> None:  # noqa: ARG002
        """Appends the last `count` tokens of a row of a batch cache, in place of a forward. Call `page_out` before."""
        raise TypeError(f"{type(self).__name__} takes nothing from a batch")

    def trim(self, room: int) -> None:  # noqa: B027  most layers have no room to free
        """Frees the room in buffers beyond the next `room` tokens (lazy). Snapshots beyond the offset must not be
        live."""

    def _transplant(self, attributes: dict[str, object]) -> None:
        own = vars(self.layer)
        own.clear()
        own.update(attributes)
