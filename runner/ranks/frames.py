"""The messages between leader and followers: frames of a kind and a body in MessagePack, with bounds."""

from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec

from runner.errors import RunnerError
from runner.settings import MOST_RANKS
from runner.tape.file import Header

Body = TypeVar("Body", bound=msgspec.Struct)
_Text = Annotated[str, msgspec.Meta(max_length=1 << 12)]


class FrameKind(IntEnum):
    """The kinds of frame."""

    JOIN = 0
    """From the leader, the first frame: a `Join`."""
    HERE = 1
    """The follower's answer: a `Here`."""
    GO = 2
    """From the leader, once all are here: a `Go`."""
    LOADED = 3
    """From a follower: a `Loaded`."""
    TAPE = 4
    """From the leader: entries of the tape."""
    BEAT = 5
    """From either side, every second: a `Beat`."""
    FAILED = 6
    """The last frame of a follower: a `RankFailed`."""


class Join(msgspec.Struct, frozen=True):
    """The model that a follower loads, and its rank."""

    rank: int
    ranks: Annotated[int, msgspec.Meta(ge=2, le=MOST_RANKS)]
    ranks_here: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    """Those that share the memory of the follower's machine."""
    backend: _Text
    header: Header
    """The model, what computes it, and the settings."""


class Here(msgspec.Struct, frozen=True):
    """A follower that is ready to join."""

    address: _Text
    """IP:PORT where it takes tensors."""
    notes: list[_Text] = []
    """Differences from the leader that it reports and tolerates."""


class Go(msgspec.Struct, frozen=True):
    """The addresses at which ranks take tensors."""

    addresses: list[_Text]


class Loaded(msgspec.Struct, frozen=True):
    """A follower that has loaded its part."""

    weights_bytes: int
    room_bytes: int
    """The part of its memory budget that the weights leave."""


class Beat(msgspec.Struct, frozen=True):
    """A rank that is alive."""

    memory_bytes: int


class RankFailed(msgspec.Struct, frozen=True):
    """The end of a follower, and its reason."""

    text: _Text
    no_memory: bool = False
    """True if memory was missing there."""

    def error(self) -> RunnerError:
        """Returns an error with these words, and of the same cause."""
        error = RunnerError(self.text)
        error.__cause__ = MemoryError() if self.no_memory else None
        return error


def decode_body(data: bytes, body: type[Body]) -> Body:
    """Returns the message in a frame. Raises RunnerError for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=body)
    except msgspec.DecodeError as error:
        raise RunnerError(f"the other side does not speak the protocol of ranks: {error}") from None
