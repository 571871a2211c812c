"""The vocabulary of caches and layers: matches, the reasons for a miss, and snapshots."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, TypeAlias

MakeLayers: TypeAlias = Callable[[], list[object]]
"""Returns a fresh cache list of one model, the same every time, as its forward takes it."""


class Miss(StrEnum):
    """The reason why fewer tokens came from the cache than the prompt shares with it, or why it shares none."""

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
    """The content of one layer for the tokens [start, stop).

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
