"""The tape between ranks: the leader's goes to every follower at once, and a follower reads it in place of the world.

It carries what a recording carries, with three differences. Clients are the leader's alone. A fault of a computation
ends all ranks, so it has no place on the tape. And each forward stands on it, with its position: ranks that disagree
end before they would wait for each other in vain.
"""

from collections.abc import Iterator
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from runner.engine.guide import Follow, Grammar, Guide, State
from runner.engine.ports import Ranks, Tape, Value, What
from runner.engine.world import Sources
from runner.errors import RequestError
from runner.ranks.link import Kind
from runner.tape.file import Entry, decode_entries, encode
from runner.tape.grammar import attempt
from runner.tape.recorder import Player, Recorder
from runner.tape.taps import TapedWorld

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from runner.engine.generation import Forward
    from runner.engine.guide import StateSource
    from runner.ranks.link import Link


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


class RankWorld(TapedWorld):
    """The world of a rank: its own until the weights are loaded, then the leader's."""

    def __init__(self, tape: Tape, ranks: Ranks) -> None:
        super().__init__(tape)
        self.ranks = self._ranks = ranks

    def machine(self, total_bytes: int, budget_bytes: int) -> tuple[int, int]:
        return total_bytes, budget_bytes

    def loaded(self, total_bytes: int, budget_bytes: int, run: "Forward") -> "tuple[int, int, Forward]":
        least_bytes = self._ranks.least_budget(budget_bytes)
        return *super().machine(total_bytes, least_bytes), forward(run, self._tape)

    def wrap(self, sources: Sources) -> Sources:
        return super().wrap(sources)._replace(forward=sources.forward)


def _position(layers: list[object]) -> int:
    """Returns the number of tokens that the layers have seen; -1 if they tell only by computing it."""
    offsets = (getattr(layer, "offset", None) for layer in layers)
    return next((offset for offset in offsets if type(offset) is int), -1)


# --- Grammars between ranks: the leader follows them, and tells its followers each state.

_begun = msgspec.msgpack.Decoder(tuple[State, int])
_state = msgspec.msgpack.Decoder(State)


class RankGrammar:
    """The compiled grammar of a request, on the leader; what stands for it, on a follower. Owner: the engine thread."""

    def __init__(self, grammar: Grammar | None, tape: Tape) -> None:
        """`grammar` is None on a follower, whose tape has all that it says."""
        self._grammar, self._tape = grammar, tape

    def guide(self) -> Guide:
        """Returns the guide. Raises RequestError if there is none any more."""
        own: Guide | None = None

        def look() -> Value:
            nonlocal own
            assert self._grammar is not None
            try:
                own = self._grammar.guide()
            except RequestError as error:
                return str(error)
            return msgspec.msgpack.encode((own.state, own.size))

        told = self._tape.of(What.GRAMMAR, look)
        if not isinstance(told, bytes):
            raise RequestError(str(told))
        guide = own or Guide(_Source(None, self._tape), *_begun.decode(told))
        guide.watch(
            lambda source: _Source(source, self._tape) if own else source,
            lambda: self._tape.of(What.SECONDS, monotonic),
        )
        return guide

    def release(self) -> None:
        """Gives the grammar back without an answer."""
        if self._grammar is not None:
            self._grammar.release()


class _Source:
    """The states of a grammar: the leader's come from where it follows the grammar, a follower's from the tape."""

    def __init__(self, source: "StateSource | None", tape: Tape) -> None:
        self._source, self._tape = source, tape

    def send(self, step: Follow) -> None:
        source = self._source
        attempt(self._tape, lambda: source.send(step) if source is not None else None)

    def receive(self, patience_s: float) -> State | None:
        def look() -> Value:
            assert self._source is not None
            try:
                state = self._source.receive(patience_s)
            except RequestError as error:
                return str(error)
            return None if state is None else msgspec.msgpack.encode(state)

        told = self._tape.of(What.STATE, look)
        if isinstance(told, str):
            raise RequestError(told)
        return _state.decode(told) if isinstance(told, bytes) else None

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
