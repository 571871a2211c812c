"""The world of an engine: the source of every value from outside that its decisions depend on. Owner: the engine
thread."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from runner.engine.events import Outbox
from runner.engine.generation import Forward
from runner.engine.request import Request
from runner.model import OpenedModel
from runner.model.weights.load import LoadedModel, load

if TYPE_CHECKING:
    from runner.engine.parts import Parts
    from runner.engine.ports import Ranks


class Turns:
    """The turns between slices, in which messages from outside arrive. Without a tape the mailbox is enough."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        """The outbox of the engine."""

    def queue(self, add: Callable[[Request], None]) -> Callable[[Request], None]:
        """Returns the function that takes a request from the mailbox, where `add` would queue it."""
        return add

    def begin_slice(self, add: Callable[[Request], None]) -> None:
        """Hands on what has happened outside since the last slice. `add` queues a request."""

    def end_slice(self, *, idle: bool) -> None:
        """Ends a slice, or the start. An `idle` engine may be ended at any moment."""


class World:
    """The real machine, on which this process has the whole model. A tape notes its values or replaces them by noted
    ones (`runner/tape`), and ranks follow those of their leader (`runner/ranks`): each derives a class from this."""

    ranks: "Ranks | None" = None
    """The processes that compute the model together; None if this one has all of it."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def machine(self, total_bytes: int, budget_bytes: int) -> tuple[int, int]:
        """Returns the memory of the machine and what MLX may hold of it, before the weights are loaded."""
        return total_bytes, budget_bytes

    def load(self, model: OpenedModel, dtype: str, budget_bytes: int) -> LoadedModel:
        """Loads the model, or the part of it that this process computes. Raises ModelError."""
        return load(model, dtype, budget_bytes)

    def loaded(self, parts: "Parts") -> None:
        """Replaces the memory and the forward, once the weights are loaded. Raises RankError if a rank has ended."""

    def forward(self, run: Forward) -> Forward:
        """Returns the forward that is called in place of this one."""
        return run

    def wrap(self, parts: "Parts") -> None:
        """Replaces all parts through which values come in while the engine computes."""
