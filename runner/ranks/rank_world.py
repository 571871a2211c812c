"""The world of a rank: the leader sends its tape to every follower, and a follower takes its outside values from it.

This tape holds the entries of a recording, with two differences. UNSHARED entries are left out: only the leader has
clients, and a fault in a computation ends all ranks. An entry for each forward is added, with its position: ranks that
disagree then end before they wait for each other in vain.
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
"""The kinds of entry that concern one rank only."""


def leader_tape(links: Sequence[Link]) -> Recorder:
    """Returns the leader's tape, which is sent to every follower. Its `flush` raises LinkClosedError if one is gone."""

    def write(entries: list[Entry]) -> None:
        data = msgspec.msgpack.encode(entries)
        for link in links:
            link.send_bytes(FrameKind.TAPE, data)

    return Recorder(write, UNSHARED)


def follower_tape(frames: "SimpleQueue[bytes]") -> Player:
    """Returns the follower's tape, which plays back the entries in these frames."""

    def entries() -> Iterator[Entry]:
        while True:
            yield from decode_entries(frames.get())

    return Player(entries(), UNSHARED, ("the leader has", "this rank"))


class RankWorld(TapedWorld):
    """The world of a rank. Its values are the rank's own until the weights are loaded, then the leader's."""

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

    def wrap(self, parts: Parts) -> None:
        run = parts.forward
        super().wrap(parts)
        parts.forward = run  # `loaded` has already wrapped this forward


def checked_forward(run: "Forward", tape: Tape) -> "Forward":
    """Returns the forward `run`. Before each call, all ranks check that they are at the same place."""

    def checked(tokens: "mx.array", layers: list[object]) -> "mx.array":
        tape.check(EntryKind.FORWARD, [*tokens.shape, _position(layers)])
        tape.flush()
        return run(tokens, layers)

    return checked


def _position(layers: list[object]) -> int:
    """Returns the number of tokens that the layers have seen; -1 if finding it would take a computation."""
    offsets = (getattr(layer, "offset", None) for layer in layers)
    return next((offset for offset in offsets if type(offset) is int), -1)
