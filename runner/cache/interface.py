"""The prefix cache as the engine sees it.

    PrefixCache.begin(tokens) -> Session    finds the part of a prompt that is cached; the rest is left to compute
    Session (session.py)                    the only way to advance the layers of the model

At least one token of every prompt is evaluated again, so that there are logits to sample from. Between sessions the
record of a cache is exactly as long as what its layers have seen.

Owner of every object here: the engine thread.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from runner.cache.session import Session


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

    @property
    def paged_bytes(self) -> int:
        """The part of them in snapshots that own their bytes."""

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
        """Returns about how many bytes the layers of a session of `tokens` tokens take."""

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
