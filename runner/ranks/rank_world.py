"""The world of a rank: the leader's tape goes to every follower at once, and a follower reads it in place of the world.

It carries what a recording carries, with two differences. UNSHARED entries are left out: clients are the leader's
alone, and a fault of a computation ends all ranks. And each forward stands on it, with its position: ranks that
disagree end before they would wait for each other in vain.
"""

from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from runner.engine.engine import Turns
from runner.engine.parts import Parts
from runner.engine.ports import Ranks
from runner.ranks.frames import FrameKind
from runner.ranks.link import Link
from runner.tape.tape import Entry, EntryKind, Player, Recorder, Tape, decode_entries
from runner.tape.taped_world import TapedWorld

if TYPE_CHECKING:
    import mlx.core as mx

    from runner.engine.generation import Forward
    from runner.model import OpenedModel
    from runner.model.weights.loading import LoadedModel

UNSHARED = (EntryKind.EVENT, EntryKind.FAULT)
"""The kinds of entry that concern one rank alone."""


def leader_tape(links: Sequence[Link]) -> Recorder:
    """Returns the tape that every follower gets. Its `flush` raises LinkClosedError."""

    def write(entries: list[Entry]) -> None:
        data = msgspec.msgpack.encode(entries)
        for link in links:
            link.send_bytes(FrameKind.TAPE, data)

    return Recorder(write, UNSHARED)


def follower_tape(frames: "SimpleQueue[bytes]") -> Player:
    """Returns the tape that arrives in these frames."""

    def entries() -> Iterator[Entry]:
        while True:
            yield from decode_entries(frames.get())

    return Player(entries(), UNSHARED, ("the leader has", "this rank"))


class RankWorld(TapedWorld):
    """The world of a rank: its own until the weights are loaded, then the leader's."""

    ranks: Ranks

    def __init__(self, tape: Tape, turns: Turns, ranks: Ranks) -> None:
        super().__init__(tape, turns)
        self.ranks = ranks

    def machine(self, total_bytes: int, budget_bytes: int) -> tuple[int, int]:
        return total_bytes, budget_bytes

    def load(self, model: "OpenedModel", dtype: str, budget_bytes: int) -> "LoadedModel":
        from runner.ranks.share import load_share

        return load_share(model, self.ranks.group, dtype, budget_bytes)

    def loaded(self, parts: Parts) -> None:
        least_bytes = self.ranks.least_budget(parts.budget_bytes)
        parts.total_bytes, parts.budget_bytes = super().machine(parts.total_bytes, least_bytes)
        parts.logits = checked_forward(parts.logits, self._tape)

    def forward(self, run: "Forward") -> "Forward":
        """Returns the forward of the warm-up, before which the tape is written. Its graph was built before all entries
        so far."""

        def flushed(tokens: "mx.array", layers: list[object]) -> "mx.array":
            self._tape.flush()
            return run(tokens, layers)

        return flushed

    def wrap(self, parts: Parts) -> None:
        run = parts.forward
        super().wrap(parts)
        parts.forward = run  # `loaded` has wrapped it


def checked_forward(run: "Forward", tape: Tape) -> "Forward":
    """Returns the forward `run`, before which all ranks make sure that they are at the same place."""

    def checked(tokens: "mx.array", layers: list[object]) -> "mx.array":
        tape.check(EntryKind.FORWARD, [*tokens.shape, _position(layers)])
        tape.flush()
        return run(tokens, layers)

    return checked


def _position(layers: list[object]) -> int:
    """Returns the number of tokens that the layers have seen; -1 if they only know it by computing it."""
    offsets = (getattr(layer, "offset", None) for layer in layers)
    return next((offset for offset in offsets if type(offset) is int), -1)
