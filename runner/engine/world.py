"""The world of an engine: where the values come from that its decisions follow from.

Here it is the world itself. A tape (runner/tape) notes these values or gives noted ones in their place, and ranks
(runner/ranks) follow those of their leader: each derives from these classes. Owner: the engine thread.
"""

from collections.abc import Callable
from typing import NamedTuple

from runner.engine.generation import Forward, Generation
from runner.engine.memory import Meter
from runner.engine.policy import SlicePolicy
from runner.engine.ports import Ranks

Post = Callable[[Callable[[], None] | None], None]
"""Has the engine thread call a function between two slices; with None it only wakes an engine that waits."""


class Sources(NamedTuple):
    """The parts of an engine through which values come in while it computes."""

    forward: Forward
    meter: Meter
    clock: Callable[[], float]
    """Seconds, from any beginning."""
    policy: SlicePolicy
    reuse_bytes: int
    """The bytes of freed arrays that MLX keeps for reuse."""
    grammar_bytes: Callable[[], int]
    """The bytes that other processes of this runner take from the budget."""
    begin: Callable[..., Generation] = Generation
    """Makes a generation."""


class World:
    """The world itself: every value is what it is, and this process has the whole model."""

    ranks: Ranks | None = None
    """The processes that compute the model together; None if this one has all of it."""

    def machine(self, total_bytes: int, budget_bytes: int) -> tuple[int, int]:
        """Returns the memory of the machine and what MLX may hold of it, before the weights are loaded."""
        return total_bytes, budget_bytes

    def loaded(self, total_bytes: int, budget_bytes: int, run: Forward) -> tuple[int, int, Forward]:
        """Returns the same two, and the forward, once the weights are loaded. Raises RankError if a rank has ended."""
        return total_bytes, budget_bytes, run

    def wrap(self, sources: Sources) -> Sources:
        """Returns the sources that the engine reads in place of these."""
        return sources
