"""The vocabulary of caches and layers: matches, the reasons for a miss, and snapshots."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, TypeAlias

MakeLayers: TypeAlias = Callable[[], list[object]]
"""Returns a fresh cache list of one model, always with the same layers, for the `cache=` argument of its forward."""


class Miss(StrEnum):
    """The reason why fewer tokens came from the cache than the prompt shares with it, or why none are shared."""

    NONE = ""
    OFF = "off"  # the cache keeps nothing
    EMPTY = "empty"  # nothing is recorded
    SALT = "salt"  # all recorded tokens have another salt: another adapter, KV format, tenant
    NO_COMMON_PREFIX = "no_common_prefix"
    LOST = "lost"  # the trie has the tokens, but no keys and values for them: for example after a failed forward
    NON_TRIMMABLE = "non_trimmable_divergence"  # a layer holds only a state at its last offset, and cannot go back
    WINDOW_PASSED = "window_passed"  # a layer has dropped tokens that it would need at an earlier offset


class Match(NamedTuple):
    """The result of a lookup: the number of tokens in the shared prefix, and the number of these not to compute."""

    matched: int
    cached: int
    miss: Miss = Miss.NONE


class Snapshot(ABC):
    """The content of one layer for the tokens [start, stop).

    A snapshot is *live* while its bytes are in the layer's own buffers; it owns no bytes then. Before a write that
    would destroy a snapshot, the layer copies the snapshot out (`LayerState.page_out`). From then on the snapshot owns
    its bytes, and shares them with no other snapshot.

    The holder of a snapshot closes it exactly once; a second `close` raises RuntimeError.
    """

    start: int
    stop: int

    @property
    @abstractmethod
    def live(self) -> bool:
        """True if the bytes of the snapshot are in the buffers of a layer."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The number of bytes that the snapshot owns: 0 while it is live."""

    @abstractmethod
    def split(self, at: int) -> tuple["Snapshot | None", "Snapshot"]:
        """Returns a snapshot of the tokens before `at` and one of the tokens from `at` on; uses up this snapshot. The
        first is None if this snapshot holds no tokens before `at`. Raises ValueError if it cannot be split there."""

    @abstractmethod
    def after(self, first: "Snapshot | None") -> "Snapshot | None":
        """Returns `first` and this snapshot, joined; uses up both. `first` is the snapshot of the tokens before this
        one, or None. Returns None if the result would be useless. Raises ValueError unless the two are adjacent."""

    @abstractmethod
    def close(self) -> None:
        """Frees the bytes."""
