"""Snapshots of the layers: live in the buffers of their layer, or paged out and owning their bytes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from runner.cache.layer_interface import Snapshot

Buffers = list[mx.array]
"""Keys, then values: [B, H, L, D] each, L counting tokens; three arrays of each if they are quantized."""
TOGETHER_BYTES = 1 << 20
"""The copies to evaluate at once: more take longer than the overhead of an evaluation."""


def own(x: mx.array) -> mx.array:
    """Returns a copy of `x` that keeps no other buffer alive (lazy).

    A slice, a deep copy, and even `mx.contiguous` of a contiguous array share the buffer they came from, whatever its
    size. `mx.array` copies an array, but without `contiguous` it keeps strides.
    """
    return mx.array(mx.contiguous(x))


class Owned(NamedTuple):
    """Content that owns its bytes, and the arrays in it: these are the whole content, unless it is a state."""

    content: object
    arrays: Buffers


class Copy(NamedTuple):
    """A pending copy, for a snapshot that will own it."""

    snapshot: "LayerSnapshot"
    owned: Owned


class Ledger:
    """Counts the open snapshots and the bytes that they own, pending copies included."""

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self.copies: Buffers = []
        self._sources: Buffers = []
        self._copied_bytes = 0

    def defer(self, copies: Buffers, sources: Sequence[mx.array] = ()) -> Owned:
        """Adds pending copies that a snapshot will own. They are evaluated with others, since every evaluation takes a
        while, whatever its size; large copies are evaluated at once, since until then their sources take room, too.

        The ledger holds the sources: MLX would reuse a buffer that nothing else holds, and not copy it.
        """
        self.copies += copies
        self._sources += sources
        self._copied_bytes += sum(copy.nbytes for copy in copies)
        if self._copied_bytes > TOGETHER_BYTES:
            self.flush()
        return Owned(copies, copies)

    def flush(self) -> None:
        """Evaluates the pending copies. Call it before anything writes into layers. Raises what MLX raises."""
        copies, sources = self.copies, self._sources
        self.copies = []
        self._sources = []
        self._copied_bytes = 0
        mx.eval(copies)
        sources.clear()


class SnapshotOwner(Protocol):
    """The layer whose buffers hold live snapshots."""

    ledger: Ledger
    live: "list[LayerSnapshot]"

    @property
    def offset(self) -> int:
        """The number of tokens that the layer has seen."""

    def copy_tokens(self, start: int, stop: int) -> Owned:
        """Returns a copy of its content for the tokens [start, stop), not evaluated."""


class LayerSnapshot(Snapshot):
    """A snapshot, live or owned. Its own bytes are evaluated by the time the ledger is flushed: a pending copy would
    hold the live buffer, and the next write would have to copy all of it."""

    def __init__(
        self,
        start: int,
        stop: int,
        owner: SnapshotOwner | None,
        ledger: Ledger,
        owned: Owned | None = None,
        needs: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """Makes a snapshot that is live in `owner`, or else has the bytes in `owned`. `needs` of a tail returns the
        first token that a layer at some offset must hold; it refers to no layer, since the snapshot may outlive it."""
        self.start = start
        self.stop = stop
        self.owner: SnapshotOwner | None = None
        """The layer in whose buffers it is live."""
        self._owned: Owned | None = None
        self._nbytes = 0
        self._ledger = ledger
        self._needs = needs
        ledger.count += 1
        if owner is not None:
            self.page_in(owner)
        elif owned is not None:
            self.page_out(owned)

    @property
    def live(self) -> bool:
        return self.owner is not None

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def owned(self) -> Owned:
        """Its own bytes. Raises RuntimeError if it is live or closed."""
        if self._owned is None:
            raise RuntimeError(f"the snapshot of tokens {self.start}..{self.stop} owns nothing")
        return self._owned

    def page_out(self, owned: Owned) -> None:
        """Gives it bytes of its own, already evaluated."""
        self._release()
        self._owned = owned
        self._nbytes = sum(array.nbytes for array in owned.arrays)
        self._ledger.nbytes += self.nbytes

    def page_in(self, owner: SnapshotOwner) -> None:
        """Moves its bytes into the buffers of `owner`."""
        self._release()
        self.owner = owner
        owner.live.append(self)

    def close(self) -> None:
        if self.owner is None and self._owned is None:
            raise RuntimeError(f"the snapshot of tokens {self.start}..{self.stop} was closed before")
        self._release()
        self._ledger.count -= 1

    def _release(self) -> None:
        if self.owner is not None:
            self.owner.live.remove(self)
        self._ledger.nbytes -= self.nbytes
        self.owner = self._owned = None
        self._nbytes = 0


class SliceSnapshot(LayerSnapshot):
    """Entries [..., start:stop, D] of a layer's buffers."""

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        if not self.start < at < self.stop:
            raise ValueError(f"cannot cut tokens {self.start}..{self.stop} at {at}")
        upper = lower = None
        if not self.live:
            pieces = [[own(half) for half in mx.split(x, [at - self.start], axis=-2)] for x in self.owned.arrays]
            upper, lower = (self._ledger.defer([*halves], self.owned.arrays) for halves in zip(*pieces, strict=True))
        halves = self._like(self.start, at, upper), self._like(at, self.stop, lower)
        self.close()
        return halves

    def after(self, first: Snapshot | None) -> Snapshot | None:
        if first is None:
            self.close()
            return None
        return self._joined(first, first.start)

    def parts(self, start: int, stop: int) -> list[mx.array]:
        """Returns its entries for the tokens [start, stop) (lazy)."""
        if self.owner is not None:
            return self.owner.copy_tokens(start, stop).arrays
        low, high = start - self.start, stop - self.start
        return [x[..., low:high, :] for x in self.owned.arrays]

    def _like(self, start: int, stop: int, owned: Owned | None) -> "SliceSnapshot":
        """Returns another snapshot of this kind: with the bytes in `owned`, or live in the same layer."""
        return type(self)(start, stop, None if owned else self.owner, self._ledger, owned, self._needs)

    def _joined(self, first: Snapshot, start: int) -> Snapshot:
        """Joins the part of `first` from `start` on, which may overlap this snapshot, with this one."""
        if not isinstance(first, type(self)) or not start < self.start <= first.stop:
            raise ValueError(f"tokens {first.start}..{first.stop} and {self.start}..{self.stop} do not meet")
        owned = None
        if not self._stays_live(first):
            pairs = zip(first.parts(start, self.start), self.parts(self.start, self.stop), strict=True)
            owned = self._ledger.defer([mx.concatenate([*pair], axis=-2) for pair in pairs])
        joined = self._like(start, self.stop, owned)
        first.close()
        self.close()
        return joined

    def _stays_live(self, first: "SliceSnapshot") -> bool:
        """Returns True if one layer holds both snapshots whole."""
        return self.owner is not None and first.owner is self.owner


class TailSnapshot(SliceSnapshot):
    """The last entries of an edge, as far back as its layer can need them."""

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        return (None, self) if at <= self.start else super().split(at)

    def after(self, first: Snapshot | None) -> Snapshot | None:
        if first is None:
            return self
        start = max(first.start, self._needs(self.stop))
        if first.stop < self.start or start >= self.start:  # there is a gap, or this one is enough
            first.close()
            return self
        return self._joined(first, start)

    def _stays_live(self, first: SliceSnapshot) -> bool:  # noqa: ARG002
        # A layer at the end of this snapshot holds all tokens needed there, even if `first` was paged out.
        return self.owner is not None and self.owner.offset == self.stop


class StateSnapshot(LayerSnapshot):
    """The state of a layer at `stop`: the snapshot of the last token alone, which cannot be split."""

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        if at >= self.stop:
            raise ValueError(f"cannot cut the state at {self.stop} tokens at {at}")
        return None, self

    def after(self, first: Snapshot | None) -> Snapshot | None:
        if first is not None:
            first.close()
        return self


def complete(copies: list[Copy]) -> None:
    """Evaluates pending copies, all at once, and gives them to their snapshots."""
    if copies:
        mx.eval([copy.owned.arrays for copy in copies])
        for snapshot, owned in copies:
            snapshot.page_out(owned)
