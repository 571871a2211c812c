"""What a prefix cache is: the words that the engine, the caches and the layer adapters share.

    cache.begin(tokens) -> Session      which part of the prompt the layers hold already, and what is left
    Session                             the only way to advance the layers of the model
    LayerState                          one layer cache of mlx-lm behind verbs that mean the same for every class
    Snapshot                            what a layer held for the tokens [start, stop)

What holds between two sessions, whatever happened in them:

* all layers stand at one offset, and the record of the cache is exactly that long;
* the record never claims a token that the layers have not seen;
* at least one token of every prompt is evaluated again, so that there are logits to sample from.

Everything here belongs to the engine thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import mlx.core as mx

    from runner.cache.report import Parts


class Miss(StrEnum):
    """Why fewer tokens came from the cache than the prompt shares with it, or why it shares none."""

    NONE = ""
    OFF = "off"  # the cache keeps nothing
    EMPTY = "empty"  # nothing is recorded
    SALT = "salt"  # recorded under another salt: another adapter, KV format, tenant
    NO_COMMON_PREFIX = "no_common_prefix"
    LOST = "lost"  # the tokens are known, but what was computed of them is gone: a failed forward, say
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
    which need not be evaluated again. `remaining` is the rest of the prompt, never empty. `recorded` is the prompt and
    what was sampled since. `layers` is what the forward of the model takes as `cache=`.
    """

    total: int
    matched: int
    cached: int
    miss: Miss
    recorded: list[int]
    layers: list[object]

    @property
    def remaining(self) -> list[int]:
        """The rest of the prompt, behind what was cached."""
        return self.recorded[self.cached : self.total]

    @property
    @abstractmethod
    def position(self) -> int:
        """How many tokens the forwards so far have shown to the layers."""

    @abstractmethod
    def next_forward(self, most: int) -> int:
        """How many tokens the next prefill forward takes, at most `most`; 0 when all are seen but the last one, which
        belongs to the first decode step. Raises ValueError unless `most` is positive.

        The tokens are those of `recorded` from `position` on. In a session that is set back (its layers have seen
        fewer tokens than are recorded) they are sampled ones too.
        """

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
    """Reuses what the layers computed for earlier prompts."""

    concurrent = False
    """Whether several sessions may be open at once, each over layers of its own."""

    @abstractmethod
    def begin(self, tokens: Sequence[int], salt: str = "") -> Session:
        """Opens a session for a prompt. Prompts of different salts never share anything.

        Raises ValueError for an empty prompt, and RuntimeError while another session is open unless the cache is
        concurrent; both leave the cache as it was. `tokens` is copied.
        """

    def follows(self, tokens: Sequence[int], salt: str = "") -> bool:  # noqa: ARG002
        """Whether an open session is about to compute more of this prompt than is kept. It keeps that then, so begin
        when it has got there: ask again after each of its forwards."""
        return False

    def admits(self, tokens: int) -> bool:  # noqa: ARG002
        """Whether a session over so many tokens fits into the budget beside those that are open. The first one always
        does."""
        return True

    def allows(self, nbytes: int) -> bool:  # noqa: ARG002
        """Whether batches of open sessions may hold so many bytes more, whatever else has to go for them."""
        return True

    def reserve(self, nbytes: int) -> None:  # noqa: B027  caches of one session have no budget
        """So many bytes are held by batches of open sessions, beside what these hold themselves."""

    def bound(self, nbytes: int) -> None:  # noqa: B027  what one session needs is needed
        """From now on it holds at most so many bytes, and no more than it was made for: what nobody uses goes."""

    def evict(self) -> None:  # noqa: B027  as above
        """Frees whatever no open session uses."""

    @abstractmethod
    def session_bytes(self, tokens: int) -> int:
        """About how many bytes the layers of a session over so many tokens take; 0 before the first forward."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets everything and frees its memory. Raises RuntimeError while a session is open."""

    def give_up(self) -> None:  # noqa: B027  with one session there is nobody else
        """Nothing is begun here any more: frees what open sessions do not need, who go on until they are closed."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held in layers and snapshots, allocated but unused room included."""

    @property
    @abstractmethod
    def parts(self) -> "Parts":
        """What it is made of, for somebody who only looks."""


class Snapshot(ABC):
    """What one layer held for the tokens [start, stop).

    It is *live* as long as the layer's own buffers hold these tokens unchanged, and costs nothing then. The layer
    copies it out before a write that would destroy it (`LayerState.page_out`); from then on it owns its bytes, shared
    with nobody.

    Whoever holds it closes it, once; closing again raises RuntimeError.
    """

    start: int
    stop: int

    @property
    @abstractmethod
    def live(self) -> bool:
        """Whether the bytes are in the buffers of a layer."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of its own: 0 while it is live."""

    @abstractmethod
    def split(self, at: int) -> tuple["Snapshot | None", "Snapshot"]:
        """Cuts at `at`, before `stop`, and consumes itself. The first half is None where nothing was held of it.
        Raises ValueError where there is nothing to cut."""

    @abstractmethod
    def after(self, first: "Snapshot | None") -> "Snapshot | None":
        """One snapshot for `first`, or a hole, and this one, which follows it; consumes both. None where what is left
        would be good for nothing. Raises ValueError where they do not meet."""

    @abstractmethod
    def close(self) -> None:
        """Frees the bytes."""


class Copy(NamedTuple):
    """A copy under way: the arrays to evaluate, and what to call once that went well."""

    arrays: "list[mx.array]"
    done: "Callable[[], None]"


class LayerState(ABC):
    """One layer cache of a model.

    A layer is *sliceable* (keys and values per token, and it can go back to any of them), or it has a *tail* (keys and
    values of the last tokens: a window, a chunk), or a *state*, good for one offset only (recurrent, or not known).
    """

    sliceable = False
    whole = False  # it has a state, whose bytes do not grow with the tokens
    batchable = False  # mlx-lm can put several of its kind into one forward
    refusal: Miss = Miss.NON_TRIMMABLE  # why it cannot go back, for the log
    live: Sequence[Snapshot] = ()
    """The snapshots whose bytes are in its buffers."""

    @property
    @abstractmethod
    def offset(self) -> int:
        """How many tokens the layer has seen."""

    @property
    def empty(self) -> bool:
        """The layer holds nothing: it is fresh, or the model makes no use of it."""
        return not self.arrays()

    @abstractmethod
    def needs(self, at: int) -> int:
        """The first token that must be held to stand at `at` tokens, less than `at`: the last one for a state."""

    @abstractmethod
    def advance(self, count: int) -> None:
        """A forward over `count` tokens went by. Layers without a clock of their own count here."""

    @abstractmethod
    def can_rewind(self, to: int) -> bool:
        """Whether the layer can go back to `to` tokens using only what it holds."""

    @abstractmethod
    def rewind(self, to: int) -> None:
        """Goes back to `to` tokens. Raises ValueError if it cannot. A layer that is not sliceable, and really moves,
        must have paged out what was live in it."""

    @abstractmethod
    def reset(self) -> None:
        """As fresh as on the first day, in the same object: a model may hold a reference to it. No snapshot may be live
        any more."""

    def abandon(self) -> None:
        """Reset, letting go of whatever is live in it, whoever still holds that."""
        self.reset()

    @abstractmethod
    def snapshot(self, start: int, stop: int) -> Snapshot | None:
        """What it holds of the tokens [start, stop), from `needs(stop)` on, as a live snapshot. None if that is
        nothing, and for a layer that is not sliceable and does not stand at `stop`."""

    @abstractmethod
    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        """Stands at the end of the last snapshot afterwards.

        A sliceable layer goes on from where it stands with spans that follow each other, and they are live then, their
        bytes moved into the layer. Any other layer must have paged out what was live in it. One with a tail copies what
        it needs; a state moves. What is live in another layer is copied, and stays there. Raises ValueError where they
        do not fit.
        """

    def absorb(self, leaf: object, row: int, count: int) -> None:  # noqa: ARG002
        """Takes what the last `count` tokens left in a row of a batch of its kind, as if its own forward had gone over
        them; called within that. What was live beyond its offset, or in a layer that is not sliceable, must have been
        paged out."""
        raise TypeError(f"{type(self).__name__} takes nothing from a batch")

    @abstractmethod
    def page_out(self) -> list[Copy]:
        """Copies of all live snapshots that a write at the present offset would destroy, to be completed before it."""

    @abstractmethod
    def arrays(self) -> "list[mx.array]":
        """The live arrays."""

    def trim(self, room: int) -> None:  # noqa: B027  most layers have no room to give back
        """Gives back what is allocated for more than `room` tokens to come (lazy). No snapshot beyond the offset may
        be live."""

    @property
    def nbytes(self) -> int:
        """Bytes of the live arrays, room for tokens to come included."""
        return sum(array.nbytes for array in self.arrays())
