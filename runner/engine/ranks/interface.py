"""The interface through which the engine sees ranks."""

from typing import TYPE_CHECKING, NoReturn, Protocol

from protocol.stats import RankCounts

if TYPE_CHECKING:
    import mlx.core as mx


class Ranks(Protocol):
    """The other processes that compute the same model. Owner: the engine thread."""

    group: "mx.distributed.Group"
    """All ranks, this one among them."""

    def agree(self, token: "mx.array") -> "mx.array":
        """Returns the tokens uint32 [B] that rank 0 drew, where `token` is what this one drew. Lazy. All ranks call it
        at the same place."""
        ...

    def least_budget(self, budget_bytes: int) -> int:
        """Returns the memory budget that all ranks can keep, by the leader's measure; called when the weights are
        loaded. `budget_bytes` is this rank's own. On a follower the result means nothing."""
        ...

    def counts(self) -> RankCounts:
        """Returns what the leader knows of all ranks; nothing on a follower."""
        ...

    def await_cause(self, error: BaseException) -> None:
        """Waits a moment for the end of another rank to be noticed, which ends this process, if that may have caused
        this error."""
        ...

    def fail(self, error: Exception) -> NoReturn:
        """Ends all ranks, because this error struck here. Raises RankError."""
        ...
