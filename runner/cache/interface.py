"""The prefix cache as the engine sees it.

    PrefixCache.begin(tokens) -> Session    finds the part of a prompt that is cached; the rest is left to compute
    Session (session.py)                    the only way to advance the layers of the model

At least one token of every prompt is evaluated again, so that there are logits to sample from. Between sessions the
record of a cache has exactly the tokens that its layers have seen.

Owner of every object here: the engine thread.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from runner.cache.session import Session


class PrefixCache(Protocol):
    """Reuses the layers' work for earlier prompts, within a budget.

    A cache that is not `concurrent` has no budget. The methods with a body here are right for such a cache.
    """

    concurrent: bool = False
    """True if several sessions may be open at once, each over layers of its own."""

    @property
    def nbytes(self) -> int:
        """Bytes held in layers and snapshots, including allocated room that is not used yet."""

    @property
    def paged_bytes(self) -> int:
        """The part of `nbytes` in snapshots that own their bytes."""

    def begin(self, tokens: Sequence[int], salt: str = "", first: int | None = None) -> "Session":
        """Opens a session for a prompt, which is copied. If the `first` token of its answer is known, the session has
        it as long as little of the prompt is left to compute. Prompts of different salts share nothing.

        Raises ValueError for an empty prompt, and RuntimeError while another session is open unless the cache is
        concurrent; both leave the cache as it was.
        """

    def follows(self, tokens: Sequence[int], salt: str = "") -> bool:  # noqa: ARG002
        """Returns True if an open session is about to compute more of this prompt than is cached. That session then
        stores the shared prefix; ask again after each of its forwards, and begin once the prefix is cached."""
        return False

    def detach(self) -> None:
        """Frees everything but the layers of open sessions, which continue until they are closed."""

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
        """Limits the cache to `nbytes`, or to its own budget if that is less, and evicts unused entries until it fits.
        Returns by how many bytes its own budget is less than `nbytes`, or 0."""
        return 0

    def evict(self) -> None:
        """Frees everything that no open session uses."""
        return
