"""Messages between leader and followers: frames of a kind and a body in MessagePack, with bounds."""

from enum import IntEnum
from typing import Annotated

import msgspec

from runner.engine.tape.values import Header
from runner.settings import MOST_RANKS

_Text = Annotated[str, msgspec.Meta(max_length=1 << 12)]


class Kind(IntEnum):
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
    """The last frame of a follower: a `Failed`."""


class Join(msgspec.Struct, frozen=True):
    """The model that a follower shall load, and its place."""

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
    """Differences from the leader that are no reason to end."""


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


class Failed(msgspec.Struct, frozen=True):
    """The end of a follower, and its reason."""

    text: _Text


encode = msgspec.msgpack.Encoder().encode
