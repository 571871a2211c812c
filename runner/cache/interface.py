"""The prefix cache as the engine sees it.

    PrefixCache.begin(tokens) -> Session    finds the part of a prompt that is cached; the rest is left to compute
    Session (session.py)                    the only way to advance the layers of the model

Even if a whole prompt is cached, its last token is evaluated again, so that there are logits to sample from. Between
sessions the record of a cache has exactly the tokens that the cache's layers have seen.

Owner of every object here: the engine thread.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from runner.cache.session import Session


class PrefixCache(Protocol):
    """Reuses the layers' work for earlier prompts, within a budget. A cache that is not `concurrent` has no budget. The
    bodies of the methods below serve such a cache."""

    concurrent: bool = False
    """True if several sessions can be open at the same time, each over layers of its own."""

    @property
    def nbytes(self) -> int:
        """Bytes held in layers and snapshots, including allocated room that is not used yet."""

    @property
    def paged_bytes(self) -> int:
        """The part of `nbytes` in snapshots that own their bytes."""

    def begin(self, tokens: Sequence[int], salt: str = "", first: int | None = None) -> "Session":
        """Opens a session for a prompt; copies `tokens`. `first` is the first token of the answer, if it is known: the
        session keeps this token only if little of the prompt is left to compute. Prompts with different salts share
        nothing.

        Raises ValueError for an empty prompt, and RuntimeError while another session is open unless the cache is
        concurrent. The cache does not change then.
        """

    def follows(self, tokens: Sequence[int], salt: str = "") -> bool:  # noqa: ARG002
        """Returns True if an open session is about to compute more of this prompt than is cached. That session then
        stores the shared prefix: call this again after each of the session's forwards, and call `begin` once the result
        is False."""
        return False

    def detach(self) -> None:
        """Frees everything except the layers of open sessions. These sessions continue until they are closed."""

    def session_bytes(self, tokens: int) -> int:
        """Returns the approximate bytes of the layers of a session with `tokens` tokens."""

    def admits(self, tokens: int) -> bool:  # noqa: ARG002
        """Returns True if a session of `tokens` tokens fits into the budget beside the open sessions. The first session
        always fits."""
        return True

    def allows(self, nbytes: int) -> bool:  # noqa: ARG002
        """Returns True if batches can hold `nbytes` more within the budget, once all unused entries are evicted."""
        return True

    def reserve(self, nbytes: int) -> None:  # noqa: ARG002
        """Sets the number of bytes that batches of open sessions hold in addition to the sessions' own layers."""
        return

    def bound(self, nbytes: int) -> int:  # noqa: ARG002
        """Limits the cache to `nbytes`, or to the cache's own budget if that is less, and evicts unused entries until
        the rest fits. Returns `nbytes` minus the new limit."""
        return 0

    def evict(self) -> None:
        """Evicts everything that no open session uses."""
        return
