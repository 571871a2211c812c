"""The interfaces between the caches and the layer adapters.

    LayerState      one of mlx-lm's layer caches behind verbs that mean the same for every class
    Mark            where a layer stood before a round
    Snapshot        what a layer held for the tokens [start, stop)
    Match, Miss     how much of a prompt is in the layers, and why not more

Owner of every object here: the engine thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import mlx.core as mx

    from runner.cache.layers.scans import RoundReads


class Miss(StrEnum):
    """Why fewer tokens came from the cache than the prompt shares with it, or why it shares none."""

    NONE = ""
    OFF = "off"  # the cache keeps nothing
    EMPTY = "empty"  # nothing is recorded
    SALT = "salt"  # recorded under another salt: another adapter, KV format, tenant
    NO_COMMON_PREFIX = "no_common_prefix"
    LOST = "lost"  # the tokens are known, but their keys and values are gone: after a failed forward, say
    NON_TRIMMABLE = "non_trimmable_divergence"  # a layer has only its last state and cannot go back
    WINDOW_PASSED = "window_passed"  # a layer has dropped tokens that going back would need


class Match(NamedTuple):
    """The result of a lookup, in tokens: the length of the shared prefix, and how much of it the layers now hold."""

    matched: int
    cached: int
    miss: Miss = Miss.NONE


class Snapshot(ABC):
    """What one layer held for the tokens [start, stop).

    A snapshot is *live* as long as the layer's own buffers hold these tokens unchanged; it takes no bytes then. The
    layer copies it out before a write that would destroy it (`LayerState.page_out`); from then on the snapshot owns
    its bytes and shares them with no other.

    Its holder closes it exactly once; a second call raises RuntimeError.
    """

    start: int
    stop: int

    @property
    @abstractmethod
    def live(self) -> bool:
        """True if the bytes are in the buffers of a layer."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it owns: 0 while it is live."""

    @abstractmethod
    def split(self, at: int) -> tuple["Snapshot | None", "Snapshot"]:
        """Splits at `at`, before `stop`, and consumes itself. The first half is None if nothing of it was held.
        Raises ValueError if there is nothing to split."""

    @abstractmethod
    def after(self, first: "Snapshot | None") -> "Snapshot | None":
        """Joins itself to `first`, the snapshot before it or None for a gap; consumes both. Returns None if the result
        would be useless. Raises ValueError if the two are not adjacent."""

    @abstractmethod
    def close(self) -> None:
        """Frees the bytes."""


class Copy(NamedTuple):
    """A pending copy: the arrays to evaluate, and the function to call afterwards."""

    arrays: "list[mx.array]"
    done: Callable[[], None]


class Mark(NamedTuple):
    """Where one layer stood before a round."""

    offset: int
    """The number of tokens that the layer had seen."""
    attributes: "dict[str, object] | None" = None
    """What takes the layer back there; None if it rewinds by itself."""
    reads: "RoundReads | None" = None
    """What the layer reads in the round, if that lets it stand after any token of it."""


class LayerState(ABC):
    """One layer cache of a model.

    A layer is *sliceable* (keys and values per token; it can go back to any token), or it has a *tail* (keys and values
    of the last tokens: a window, a chunk), or a *state* that is valid at one offset only (recurrent or unknown).
    """

    sliceable = False
    whole = False
    """True for a state, whose size does not grow with the tokens."""
    batchable = False
    """True if mlx-lm has a batch cache for this class."""
    markable = False
    """True if the layer can go back after a round: `mark`, `can_revert` and `revert` work."""
    counted = True
    """True if the layer has no offset of its own: `advance` is called after each forward."""
    refusal: Miss = Miss.NON_TRIMMABLE
    """Why the layer cannot go back, for the log."""
    live: Sequence[Snapshot] = ()
    """The snapshots whose bytes are in the buffers of the layer."""

    @property
    @abstractmethod
    def offset(self) -> int:
        """The number of tokens that the layer has seen."""

    @property
    def empty(self) -> bool:
        """True if the layer holds nothing: it is fresh, or the model does not use it."""
        return not self.arrays()

    @abstractmethod
    def needs(self, at: int) -> int:
        """Returns the first token, less than `at`, that must be held to stand at `at`: for a state, the last one."""

    @abstractmethod
    def advance(self, count: int) -> None:
        """Notes a forward over `count` tokens. Called only if the layer is `counted`."""

    @abstractmethod
    def can_rewind(self, to: int) -> bool:
        """Returns True if the layer can go back to `to` tokens with only what it holds."""

    @abstractmethod
    def rewind(self, to: int) -> None:
        """Goes back to `to` tokens. Raises ValueError if it cannot. The live snapshots of a layer that is not
        sliceable must be paged out before it moves."""

    def mark(self, count: int) -> Mark:  # noqa: ARG002
        """Returns a mark before a forward over `count` tokens, at least 2: a single one may be written into the very
        arrays that the mark holds. Raises TypeError unless the layer is `markable`.

        A layer that rewinds by itself gives none of its arrays away: with a reference to them, MLX would have to copy
        them in every forward.
        """
        raise TypeError(f"{type(self).__name__} takes no marks")

    def can_revert(self, mark: Mark, to: int) -> bool:  # noqa: ARG002
        """Returns True if the layer, which has seen the forward that followed the mark, can go back to `to` tokens.
        That is so for the tokens at the mark, for some layers also for those after it."""
        return False

    def revert(self, mark: Mark, to: int) -> None:  # noqa: ARG002
        """Goes back to `to` tokens, and uses up the mark. Raises ValueError if it cannot. No snapshot of a layer that
        is not sliceable may be live in it."""
        raise TypeError(f"{type(self).__name__} takes no marks")

    @abstractmethod
    def reset(self) -> None:
        """Empties the layer, keeping the same object: a model may refer to it. No snapshot may be live in it."""

    def discard(self) -> None:
        """Resets the layer and loses its live snapshots, even those that are still held elsewhere."""
        self.reset()

    @abstractmethod
    def snapshot(self, start: int, stop: int) -> Snapshot | None:
        """Returns a live snapshot of the tokens [start, stop), from `needs(stop)` on. None if that is empty, and for a
        layer that is not sliceable and does not stand at `stop`."""

    @abstractmethod
    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        """Takes the layer to the end of the last snapshot.

        A sliceable layer continues from its offset with adjacent spans; their bytes move into the layer, where the
        snapshots are live from then on. Any other layer must have paged out its live snapshots. A layer with a tail
        copies what it needs; a state moves. Snapshots that are live in another layer are copied, and stay there.
        Raises ValueError if the snapshots do not fit.
        """

    def absorb(self, batch_cache: object, row: int, count: int) -> None:  # noqa: ARG002
        """Takes over what the last `count` tokens left in a row of a batch cache, in place of a forward of its own.
        Snapshots that are live beyond its offset, or in a layer that is not sliceable, must have been paged out."""
        raise TypeError(f"{type(self).__name__} takes nothing from a batch")

    @abstractmethod
    def page_out(self) -> list[Copy]:
        """Returns copies of all live snapshots that a write at the present offset would destroy. The caller completes
        them before that write."""

    @abstractmethod
    def arrays(self) -> "list[mx.array]":
        """Returns the arrays that the layer holds."""

    def trim(self, room: int) -> None:  # noqa: B027  most layers have no room to give back
        """Frees buffer room beyond the next `room` tokens (lazy). No snapshot beyond the offset may be live."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, including room for tokens to come."""
        return sum(array.nbytes for array in self.arrays())
