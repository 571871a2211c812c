"""What a prefix cache is: the words that the engine, the caches and the layer adapters share.

    cache.begin(tokens) -> Session      which part of the prompt the layers hold already, and what is left
    Session                             the only way to advance the layers of the model
    LayerState                          one layer cache of mlx-lm behind verbs that mean the same for every class
    Snapshot                            a copy of what a layer held for the tokens [start, stop)

What holds between two sessions, whatever happened in them:

* all layers stand at one offset, and the record of the cache is exactly that long;
* the record never claims a token that the layers have not seen;
* at least one token of every prompt is evaluated again, so that there are logits to sample from.

Everything here belongs to the engine thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import mlx.core as mx


class Miss(StrEnum):
    """Why fewer tokens came from the cache than the prompt shares with it, or why it shares none."""

    NONE = ""
    OFF = "off"  # the cache keeps nothing
    EMPTY = "empty"  # nothing is recorded
    SALT = "salt"  # recorded under another salt: another adapter, KV format, tenant
    NO_COMMON_PREFIX = "no_common_prefix"
    NON_TRIMMABLE = "non_trimmable_divergence"  # a layer has only its last state and cannot go back
    WINDOW_PASSED = "window_passed"  # a layer has dropped tokens that going back would need


class Match(NamedTuple):
    """What `begin` found, in tokens: the common prefix, and how much of it the layers now hold."""

    matched: int
    cached: int
    miss: Miss = Miss.NONE


class Session(ABC):
    """One request's use of the layers, from `begin` to `close`.

    `total`, `matched` and `cached` count tokens: the prompt, the prefix it shares with the cache, and the part of that
    which need not be evaluated again. `remaining` is the rest of the prompt, never empty. `layers` is what the forward
    of the model takes as `cache=`.
    """

    total: int
    matched: int
    cached: int
    miss: Miss
    remaining: list[int]
    layers: list[object]

    @abstractmethod
    def forward_plan(self, chunk: int) -> Iterator[int]:
        """The lengths of the prefill forwards, each at most `chunk`. They sum to `len(remaining) - 1`: the last token
        of the prompt belongs to the first decode step."""

    @abstractmethod
    def forward(self, count: int) -> AbstractContextManager[None]:
        """Surrounds the call of the model over the next `count` tokens, and nothing that may fail for other reasons.

        MLX is lazy: the block may, but need not, contain the evaluation. An exception inside leaves some layers behind
        others and some in unknown state; the session then ends with everything freed.
        """

    @abstractmethod
    def record(self, token: int) -> None:
        """A sampled token. Record it as soon as it is known, before anything else can happen to it, whether or not
        its forward was dispatched already; the token that ends a generation is recorded too."""

    @abstractmethod
    def state(self) -> list["mx.array"]:
        """Every array of every layer, to evaluate after a forward."""

    @abstractmethod
    def close(self, failed: bool = False) -> None:
        """Ends the session; call it in a `finally`. A second call does nothing.

        Levels all layers to the tokens that are both recorded and seen, and keeps them. With `failed` (an evaluation
        raised, the arrays cannot be trusted), or when a layer cannot be levelled, everything is freed and logged.
        """


class PrefixCache(ABC):
    """Reuses what the layers computed for earlier prompts. One session at a time."""

    @abstractmethod
    def begin(self, tokens: Sequence[int], salt: str = "") -> Session:
        """Opens a session for a prompt. Prompts of different salts never share anything.

        Raises ValueError for an empty prompt and RuntimeError while another session is open; both leave the cache as
        it was. `tokens` is copied.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forgets everything and frees its memory. Raises RuntimeError while a session is open."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held in layers and snapshots, allocated but unused room included."""


class Snapshot(ABC):
    """What one layer held for the tokens [start, stop): its own bytes, shared with nobody.

    Whoever holds it closes it, once; closing again raises RuntimeError. For a layer that has only its last state
    `start` is mere bookkeeping.
    """

    start: int
    stop: int
    nbytes: int

    @abstractmethod
    def close(self) -> None:
        """Frees the bytes."""


class LayerState(ABC):
    """One layer cache of a model.

    A layer is either *sliceable* (keys and values per token, every range means something) or *whole-state* (only the
    state at one offset means something: a filled window, a recurrent state, a class that we do not know).
    """

    refusal: Miss = Miss.NON_TRIMMABLE  # why `rewind` says no, for the log

    @property
    @abstractmethod
    def offset(self) -> int:
        """How many tokens the layer has seen."""

    @property
    def empty(self) -> bool:
        """The layer holds nothing: it is fresh, or the model makes no use of it."""
        return not self.arrays()

    @abstractmethod
    def advance(self, count: int) -> None:
        """A forward over `count` tokens went by. Layers without a clock of their own count here."""

    @abstractmethod
    def rewind(self, to: int) -> bool:
        """Goes back to `to` tokens using only what the layer holds. False, and unchanged, if it cannot."""

    @abstractmethod
    def reset(self) -> None:
        """As fresh as on the first day, in the same object: a model may hold a reference to it."""

    @abstractmethod
    def snapshot(self, start: int) -> Snapshot | None:
        """A copy of the tokens [start, offset), evaluated; None where there are none."""

    @abstractmethod
    def restore(self, snapshot: Snapshot, to: int) -> bool:
        """Stands at `to` tokens afterwards, with a copy of the content of `snapshot`. False, and unchanged, if the
        snapshot cannot give that state. A sliceable layer must hold the tokens before `snapshot.start` already."""

    @abstractmethod
    def split(self, snapshot: Snapshot, at: int) -> tuple[Snapshot | None, Snapshot]:
        """Cuts [start, stop) at `at`, strictly between the two, and consumes the snapshot. The first half is None for
        a whole-state layer. Raises ValueError where there is nothing to cut."""

    @abstractmethod
    def merge(self, first: Snapshot | None, second: Snapshot | None) -> Snapshot | None:
        """One snapshot for two that follow each other; consumes both. With a hole on either side a sliceable layer
        keeps nothing; a whole-state layer keeps the second. Raises ValueError where they do not meet."""

    @abstractmethod
    def arrays(self) -> list["mx.array"]:
        """The live arrays."""

    @property
    def nbytes(self) -> int:
        """Bytes of the live arrays, room for tokens to come included."""
        return sum(array.nbytes for array in self.arrays())
