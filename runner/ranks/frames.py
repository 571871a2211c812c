"""The messages between leader and followers: frames, each with a kind and a bounded body in MessagePack."""

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
    """The leader's first frame: a `Join`."""
    HERE = 1
    """The follower's answer to JOIN: a `Here`."""
    GO = 2
    """From the leader, once all followers have answered: a `Go`."""
    LOADED = 3
    """From a follower that has loaded its part of the model: a `Loaded`."""
    TAPE = 4
    """From the leader: entries of its tape."""
    BEAT = 5
    """From either side, every second: a `Beat`."""
    FAILED = 6
    """The last frame of a follower: a `RankFailed`."""


class Join(msgspec.Struct, frozen=True):
    """The model that a follower loads, and its rank."""

    rank: int
    ranks: Annotated[int, msgspec.Meta(ge=2, le=MOST_RANKS)]
    ranks_here: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    """The number of ranks that share the memory of the follower's machine."""
    backend: _Text
    header: Header
    """The model, the versions and libraries that compute it, and the settings."""


class Here(msgspec.Struct, frozen=True):
    """A follower that is ready to join."""

    address: _Text
    """The IP:PORT at which the follower receives tensors."""
    notes: list[_Text] = []
    """The differences from the leader that are reported and tolerated."""


class Go(msgspec.Struct, frozen=True):
    """The addresses at which the ranks receive tensors."""

    addresses: list[_Text]


class Loaded(msgspec.Struct, frozen=True):
    """A follower that has loaded its part of the model."""

    weights_bytes: int
    room_bytes: int
    """The bytes of the follower's budget that its weights leave free."""


class Beat(msgspec.Struct, frozen=True):
    """The sign that a rank is alive."""

    memory_bytes: int


class RankFailed(msgspec.Struct, frozen=True):
    """The end of a follower, and the reason."""

    text: _Text
    no_memory: bool = False
    """True if the follower ran out of memory."""

    def error(self) -> RunnerError:
        """Returns an error with this text and, if memory ran out, with that cause."""
        error = RunnerError(self.text)
        error.__cause__ = MemoryError() if self.no_memory else None
        return error


def decode_body(data: bytes, body: type[Body]) -> Body:
    """Returns the message in a frame's body. Raises RunnerError if `data` is no such message."""
    try:
        return msgspec.msgpack.decode(data, type=body)
    except msgspec.DecodeError as error:
        raise RunnerError(f"the other side does not speak the protocol of ranks: {error}") from None
