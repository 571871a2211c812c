"""The tape between ranks: the leader's goes to every follower at once, and a follower reads it in place of the world.

It carries what a recording carries, with three differences. Clients are the leader's alone. A fault of a computation
ends all ranks, so it has no place on the tape. And each forward stands on it, with its position: ranks that disagree
end before they would wait for each other in vain.
"""

from collections.abc import Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING

from runner.engine.ranks.messages import Kind
from runner.engine.tape.interface import Tape, Value, What
from runner.engine.tape.player import Player
from runner.engine.tape.recorder import Recorder
from runner.engine.tape.values import Entry, decode_entries, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from runner.engine.generation import Forward
    from runner.engine.ranks.link import Link


class Links:
    """The links to all followers."""

    def __init__(self, links: "Sequence[Link]") -> None:
        self._links = links

    def write(self, entries: list[Entry]) -> None:
        """Sends the entries to every follower. Raises LinkClosedError."""
        data = encode(entries)
        for link in self._links:
            link.send_bytes(Kind.TAPE, data)


class LeaderTape(Recorder):
    """The leader's tape. Owner: the engine thread."""

    def same(self, what: What, value: Value) -> None:
        if what is not What.EVENT:
            super().same(what, value)

    def fault(self, met: list[Value] | None) -> list[Value] | None:  # noqa: ARG002 - it ends all ranks
        return None


class FollowerTape(Player):
    """A follower's tape. Owner: the engine thread."""

    sides = ("the leader has", "this rank")

    def __init__(self, frames: "SimpleQueue[bytes]") -> None:
        super().__init__(_entries(frames))

    def same(self, what: What, value: Value) -> None:
        if what is not What.EVENT:
            super().same(what, value)

    def fault(self, met: list[Value] | None) -> list[Value] | None:  # noqa: ARG002 - it ends all ranks
        return None


def _entries(frames: "SimpleQueue[bytes]") -> Iterator[Entry]:
    while True:
        yield from decode_entries(frames.get())


def forward(run: "Forward", tape: Tape) -> "Forward":
    """Returns the forward `run`, before which all ranks make sure that they are at the same place."""

    def checked(tokens: "mx.array", layers: list[object]) -> "mx.array":
        tape.same(What.FORWARD, [*tokens.shape, _position(layers)])
        tape.flush()
        return run(tokens, layers)

    return checked


def _position(layers: list[object]) -> int:
    """Returns the number of tokens that the layers have seen; -1 if they tell only by computing it."""
    offsets = (getattr(layer, "offset", None) for layer in layers)
    return next((offset for offset in offsets if type(offset) is int), -1)
