"""The prefix cache as the engine sees it.

    PrefixCache.begin(tokens) -> Session    finds the part of a prompt that is cached; the rest is left to compute
    Session (session.py)                    the only way to advance the layers of the model

At least one token of every prompt is evaluated again, so that there are logits to sample from. Between sessions the
record of a cache is exactly as long as what its layers have seen.

Owner of every object here: the engine thread.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from protocol.stats import CacheCounts, CacheNode

if TYPE_CHECKING:
    from runner.cache.session import Session

MakeLayers: TypeAlias = Callable[[], list[object]]
"""Returns a fresh cache list of one model, the same every time, as its forward takes it."""
Spell: TypeAlias = Callable[[Sequence[int]], str]
"""Returns the beginning of the text of some tokens."""


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


class PrefixCache(Protocol):
    """Reuses what the layers computed for earlier prompts, within a budget.

    A cache that is not `concurrent` has no budget: its only session needs what it needs. The methods that have a body
    here are those of such a cache.
    """

    concurrent: bool = False
    """True if several sessions may be open at once, each over layers of its own."""

    @property
    def nbytes(self) -> int:
        """Bytes held in layers and snapshots, including allocated room that is not used yet."""

    # --- sessions

    def begin(self, tokens: Sequence[int], salt: str = "", first: int | None = None) -> "Session":
        """Opens a session for a prompt. The `first` token of its answer is known; the session has it if little of the
        prompt is left to compute. Prompts of different salts share nothing.

        Raises ValueError for an empty prompt, and RuntimeError while another session is open unless the cache is
        concurrent; both leave the cache as it was. `tokens` is copied.
        """

    def follows(self, tokens: Sequence[int], salt: str = "") -> bool:  # noqa: ARG002
        """Returns True if an open session is about to compute more of this prompt than is cached. That session then
        stores what they share; ask again after each of its forwards, and begin once it is there."""
        return False

    def detach(self) -> None:
        """Frees everything but the layers of open sessions, which continue until they are closed."""

    # --- the budget

    def session_bytes(self, tokens: int) -> int:
        """Returns about how many bytes the layers of a session of `tokens` tokens take; 0 before the first forward."""

    def admits(self, tokens: int) -> bool:  # noqa: ARG002
        """Returns True if a session of `tokens` tokens fits into the budget beside the open ones. The first session
        always fits."""
        return True

    def allows(self, nbytes: int) -> bool:  # noqa: ARG002
        """Returns True if batches of open sessions may hold `nbytes` more, once everything unused is evicted."""
        return True

    def reserve(self, nbytes: int) -> None:  # noqa: ARG002
        """Sets the bytes that batches of open sessions hold, in addition to the sessions' own layers."""
        return

    def bound(self, nbytes: int) -> int:  # noqa: ARG002
        """Limits the cache to `nbytes`, or to the budget that it was made with if that is less, and evicts unused
        entries until it fits. Returns by how many bytes that budget is less than `nbytes`; 0 if it is not."""
        return 0

    def evict(self) -> None:
        """Frees everything that no open session uses."""
        return

    # --- what it holds; reading changes nothing: no node counts as used, nothing is copied

    def describe(self) -> CacheDescription:
        """Returns what the cache holds, in numbers."""

    def nodes(self, spell: Spell | None = None, most: int = 1000) -> list[CacheNode]:
        """Returns the nodes of the trie, parents before their children, or one node for a cache of one sequence.
        Without `spell` the nodes carry no text.

        Of a trie with more than `most` nodes it returns about `most`, the most recently used ones: a node takes a few
        microseconds.
        """
