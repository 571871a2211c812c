"""Snapshots of layers: live in the buffers of a layer, or paged out with bytes of their own."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from runner.cache.layer_interface import Snapshot

Buffers = list[mx.array]
"""Keys, then values, each [B, H, L, D] with L tokens. If quantized: three arrays of keys, then three of values."""
TOGETHER_BYTES = 1 << 20
"""The bytes of copies that are worth an evaluation: for fewer, the overhead is longer than the copying."""
GROUP_BYTES = {"cpu": 8 << 20, "gpu": 64 << 20}
"""The bytes of layers that are copied in one evaluation, by device. Each evaluation waits for the device, a GPU's for
longer, but all layers together would need as much memory again."""


def own(x: mx.array) -> mx.array:
    """Returns a copy of `x` that keeps no other buffer alive (lazy). A slice, a deep copy, and even `mx.contiguous` of
    a contiguous array share the whole buffer of the original. `mx.array` copies an array, but keeps its strides unless
    `mx.contiguous` comes first."""
    return mx.array(mx.contiguous(x))


class Owned(NamedTuple):
    """Content that owns its bytes, and the arrays in this content. Except for a state, the arrays are the content."""

    content: object
    arrays: Buffers


class Copy(NamedTuple):
    """A pending copy, and the snapshot that will own it."""

    snapshot: "LayerSnapshot"
    owned: Owned


class Ledger:
    """Counts the open snapshots and the bytes that snapshots own, pending copies included."""

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self.checkpoint_bytes = 0
        """The part of `nbytes` in snapshots of tails and states."""
        self.copies: Buffers = []
        self._sources: Buffers = []
        self._copied_bytes = 0

    def defer(self, copies: Buffers, sources: Sequence[mx.array] = ()) -> Owned:
        """Adds pending copies for a snapshot, and returns them as its content. Small copies are evaluated later,
        together: each evaluation has an overhead. Large copies are evaluated immediately, since their sources take room
        until then. The ledger holds the `sources`: otherwise MLX would reuse their buffers and not copy them."""
        self.copies += copies
        self._sources += sources
        self._copied_bytes += sum(copy.nbytes for copy in copies)
        if self._copied_bytes > TOGETHER_BYTES:
            self.flush()
        return Owned(copies, copies)

    def flush(self) -> None:
        """Evaluates the pending copies. Call it before a write into any layer. Raises the errors of MLX."""
        copies, sources = self.copies, self._sources
        self.copies = []
        self._sources = []
        self._copied_bytes = 0
        mx.eval(copies)
        sources.clear()


class SnapshotOwner(Protocol):
    """A layer whose buffers hold live snapshots."""

    ledger: Ledger
    live: "list[LayerSnapshot]"

    @property
    def offset(self) -> int:
        """The number of tokens that the layer has seen."""

    def copy_tokens(self, start: int, stop: int) -> Owned:
        """Returns a copy of the layer's content for the tokens [start, stop), not evaluated."""


class LayerSnapshot(Snapshot):
    """A snapshot of one layer. Flush the ledger before the next write into a layer: until then a pending copy of the
    snapshot's bytes holds the live buffer, and MLX would copy the whole buffer for the write."""

    at_checkpoints = True
    """True for tails and states."""

    def __init__(
        self,
        start: int,
        stop: int,
        owner: SnapshotOwner | None,
        ledger: Ledger,
        owned: Owned | None = None,
        needs: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """Makes a snapshot that is live in `owner`, or has the bytes in `owned` if `owner` is None. `needs` returns the
        first token that a layer with a tail must hold at an offset. It must not refer to the layer: snapshots may
        outlive it."""
        self.start = start
        self.stop = stop
        self.owner: SnapshotOwner | None = None
        """The layer in whose buffers the snapshot is live, or None."""
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
        """The snapshot's own bytes. Raises RuntimeError if the snapshot is live or closed."""
        if self._owned is None:
            raise RuntimeError(f"the snapshot of tokens {self.start}..{self.stop} owns nothing")
        return self._owned

    def page_out(self, owned: Owned) -> None:
        """Gives the snapshot the bytes in `owned`, which are evaluated or pending in the ledger."""
        self._release()
        self._owned = owned
        self._nbytes = sum(array.nbytes for array in owned.arrays)
        self._count(self.nbytes)

    def page_in(self, owner: SnapshotOwner) -> None:
        """Makes the snapshot live in `owner`, whose buffers must hold its bytes, and drops bytes of its own."""
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
        self._count(-self.nbytes)
        self.owner = self._owned = None
        self._nbytes = 0

    def _count(self, nbytes: int) -> None:
        self._ledger.nbytes += nbytes
        self._ledger.checkpoint_bytes += nbytes if self.at_checkpoints else 0


class SliceSnapshot(LayerSnapshot):
    """Entries [..., start:stop, D] of a layer's buffers."""

    at_checkpoints = False

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
        """Returns the entries for the tokens [start, stop) (lazy)."""
        if self.owner is not None:
            return self.owner.copy_tokens(start, stop).arrays
        low, high = start - self.start, stop - self.start
        return [x[..., low:high, :] for x in self.owned.arrays]

    def _like(self, start: int, stop: int, owned: Owned | None) -> "SliceSnapshot":
        """Returns a snapshot of the same class, with the bytes in `owned`, or live in the same layer."""
        return type(self)(start, stop, None if owned else self.owner, self._ledger, owned, self._needs)

    def _joined(self, first: Snapshot, start: int) -> Snapshot:
        """Joins `first`, from the token `start` on, and this snapshot. The two may overlap. Uses up both."""
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
        """Returns True if one layer holds all bytes of both snapshots."""
        return self.owner is not None and first.owner is self.owner


class TailSnapshot(SliceSnapshot):
    """Entries of a layer with a tail: the last tokens of an edge, at most as many as the layer needs at `stop`."""

    at_checkpoints = True

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        return (None, self) if at <= self.start else super().split(at)

    def after(self, first: Snapshot | None) -> Snapshot | None:
        if first is None:
            return self
        start = max(first.start, self._needs(self.stop))
        if first.stop < self.start or start >= self.start:  # a gap is between the two, or this snapshot alone is enough
            first.close()
            return self
        return self._joined(first, start)

    def _stays_live(self, first: SliceSnapshot) -> bool:  # noqa: ARG002
        # A layer that stands at `stop` holds all tokens that it needs there, even if `first` is paged out.
        return self.owner is not None and self.owner.offset == self.stop


class StateSnapshot(LayerSnapshot):
    """The state of a layer at `stop`. It counts as a snapshot of only the last token, and cannot be split."""

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        if at >= self.stop:
            raise ValueError(f"cannot cut the state at {self.stop} tokens at {at}")
        return None, self

    def after(self, first: Snapshot | None) -> Snapshot | None:
        if first is not None:
            first.close()
        return self


def complete(copies: list[Copy]) -> None:
    """Evaluates pending copies together, and gives each of them to its snapshot."""
    if copies:
        mx.eval([copy.owned.arrays for copy in copies])
        for snapshot, owned in copies:
            snapshot.page_out(owned)
