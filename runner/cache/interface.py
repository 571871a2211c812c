"""The prefix cache as the engine sees it.

    PrefixCache.begin(tokens) -> Session    finds the part of a prompt that is cached; the rest is left to compute
    Session                                 the only way to advance the layers of the model
    CacheBudget                             what the cache holds, and how much it may hold
    Cache                                   a prefix cache with a budget: what `make_cache` returns

What holds between sessions, whatever happened in them:

* all layers stand at one offset, and the record of the cache is exactly that long;
* the record never claims a token that the layers have not seen;
* at least one token of every prompt is evaluated again, so that there are logits to sample from.

Owner of every object here: the engine thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from protocol.stats import CacheCounts, CacheNode

if TYPE_CHECKING:
    import mlx.core as mx

Spell: TypeAlias = Callable[[Sequence[int]], str]
"""Returns the beginning of the text of some tokens."""


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


class Session(ABC):
    """One request's use of the layers, from `begin` to `close`.

    `total`, `matched` and `cached` count tokens: the prompt, the prefix it shares with the cache, and the part of that
    prefix which need not be evaluated again. `remaining` is the rest of the prompt, never empty. `recorded` is the
    prompt and the tokens sampled since. `layers` is the `cache=` argument of the model's forward.
    """

    total: int
    matched: int
    cached: int
    miss: Miss
    recorded: list[int]
    layers: list[object]

    @property
    def remaining(self) -> list[int]:
        """The tokens of the prompt that were not cached."""
        return self.recorded[self.cached : self.total]

    @property
    @abstractmethod
    def position(self) -> int:
        """The number of tokens that the layers have seen."""

    @abstractmethod
    def next_forward(self, most: int) -> int:
        """Returns the number of tokens of the next prefill forward, at most `most`; 0 once all are seen but the last,
        which belongs to the first decode step. Raises ValueError unless `most` is positive.

        The tokens are those of `recorded` from `position` on. In a session that is set back (its layers have seen
        fewer tokens than are recorded) sampled tokens are among them.
        """

    @abstractmethod
    def forward(self, count: int) -> AbstractContextManager[None]:
        """Surrounds the call of the model over the next `count` tokens, and nothing that may fail for other reasons.

        MLX is lazy: the block may contain the evaluation, but need not. An exception inside leaves some layers behind
        others and some in an unknown state; the session then ends with everything freed.
        """

    @abstractmethod
    def record(self, token: int) -> None:
        """Records a sampled token. Call it as soon as the token is known, before anything else can happen to it,
        whether or not its forward was dispatched already. The token that ends a generation is recorded too."""

    @abstractmethod
    def state(self) -> list["mx.array"]:
        """Returns every array of every layer, to evaluate after a forward."""

    @abstractmethod
    def close(self, failed: bool = False) -> None:
        """Ends the session; call it in a `finally`. A second call does nothing.

        Rewinds all layers to the tokens that are both recorded and seen, and stores them. With `failed` (an evaluation
        raised, the arrays cannot be trusted), or when a layer cannot be rewound, frees everything and logs it.
        """


class CacheDescription(NamedTuple):
    """A cache at one moment, in plain data."""

    mark: tuple[int, ...]
    """Changes whenever `PrefixCache.nodes` may change."""
    counts: CacheCounts
    """Without the misses, which the engine counts."""
    sessions: int = 0
    """The number of open sessions."""
    snapshots: int = 0
    """The number of open snapshots, live ones included."""
    recorded_tokens: int = 0
    """The length of the sequence that the layers hold between sessions; 0 while a session writes into them."""
    reserved_bytes: int = 0
    """Held by batches, in addition to the layers of their sessions; part of `counts.live_bytes`."""


class PrefixCache(ABC):
    """Reuses what the layers computed for earlier prompts."""

    concurrent = False
    """True if several sessions may be open at once, each over layers of its own."""

    @abstractmethod
    def begin(self, tokens: Sequence[int], salt: str = "") -> Session:
        """Opens a session for a prompt. Prompts of different salts share nothing.

        Raises ValueError for an empty prompt, and RuntimeError while another session is open unless the cache is
        concurrent; both leave the cache as it was. `tokens` is copied.
        """

    def begin_greedy(self, tokens: Sequence[int], most: int, ends: Collection[int], salt: str = "") -> Session:  # noqa: ARG002
        """Opens a session as `begin` does, for an answer each of whose tokens is the most probable one behind those
        before it. A cache that knows such tokens gives the session up to `most` of them, and none from the first one in
        `ends` on."""
        return self.begin(tokens, salt)

    def follows(self, tokens: Sequence[int], salt: str = "") -> bool:  # noqa: ARG002
        """Returns True if an open session is about to compute more of this prompt than is cached. That session then
        stores what they share; ask again after each of its forwards, and begin once it is there."""
        return False

    @abstractmethod
    def clear(self) -> None:
        """Forgets everything and frees its memory. Raises RuntimeError while a session is open."""

    def detach(self) -> None:  # noqa: B027  the only session is released when it closes
        """Frees everything but the layers of open sessions, which continue until they are closed."""

    @abstractmethod
    def describe(self) -> CacheDescription:
        """Returns what the cache holds, in numbers. Changes nothing: no node counts as used, nothing is copied."""

    @abstractmethod
    def nodes(self, spell: Spell | None = None, most: int = 1000) -> list[CacheNode]:
        """Returns the nodes of the trie, parents before their children, or one node for a cache of one sequence.
        Changes nothing. Without `spell` the nodes carry no text.

        Of a trie with more than `most` nodes it returns about `most`, the most recently used ones: a node takes a few
        microseconds.
        """


class CacheBudget(ABC):
    """The bytes that a cache holds and may hold. Caches of one session at a time have no limit of their own."""

    @abstractmethod
    def session_bytes(self, tokens: int) -> int:
        """Returns about how many bytes the layers of a session of `tokens` tokens take; 0 before the first forward."""

    def admits(self, tokens: int) -> bool:  # noqa: ARG002
        """Returns True if a session of `tokens` tokens fits into the budget beside the open ones. The first session
        always fits."""
        return True

    def allows(self, nbytes: int) -> bool:  # noqa: ARG002
        """Returns True if batches of open sessions may hold `nbytes` more, once everything unused is evicted."""
        return True

    def reserve(self, nbytes: int) -> None:  # noqa: B027  caches of one session have no budget
        """Sets the bytes that batches of open sessions hold, in addition to the sessions' own layers."""

    def bound(self, nbytes: int) -> None:  # noqa: B027  a single session needs what it needs
        """Limits the cache to `nbytes`, or to the budget that it was made with if that is less, and evicts unused
        entries until it fits."""

    def evict(self) -> None:  # noqa: B027  as above
        """Frees everything that no open session uses."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held in layers and snapshots, including allocated room that is not used yet."""


class Cache(PrefixCache, CacheBudget):
    """A prefix cache and its budget."""
