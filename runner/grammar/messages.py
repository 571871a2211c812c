"""What the runner and the processes that compile formats say to each other: MessagePack behind its length."""

import struct

import msgspec

_HEAD = struct.Struct("<I")
HEAD_BYTES = _HEAD.size
"""In front of each message: how many bytes follow."""
ORDER = struct.Struct("<cI")
"""To the process that forks: what to do, and the number that the runner has given the worker."""
FORK, KILL, SLOW = b"F", b"K", b"S"
"""Fork one that serves the descriptor which comes along; end it; let other processes go first."""
COMPILE_S = 5.0
"""The longest that a worker may compile; then the kernel ends it."""


class CompilerSetup(msgspec.Struct, frozen=True):
    """The first message to the process that forks; answered with a `State`, whose error says what is wrong with it."""

    files: dict[str, bytes]
    """The paths of the model's text files, as the system has them, by name."""
    merge_eos: bool
    """As for `open_tokenizer`."""
    vocab_size: int
    """That of the model, in tokens; 0 if it is not known."""


class Compile(msgspec.Struct, frozen=True):
    """The first message to a worker; answered with a `State`, the beginning of an answer."""

    format: bytes
    """A `Format` as JSON."""
    memory_bytes: int
    """The most that the worker may allocate from here on."""


class Follow(msgspec.Struct, frozen=True):
    """The answer goes on with these tokens; answered with a `State`."""

    tokens: list[int]
    restart: bool = False
    """Whether they follow its beginning, and not what came last."""


class State(msgspec.Struct, frozen=True):
    """Where an answer stands in its grammar."""

    forced: list[int] = []
    """Tokens that the grammar leaves no choice about. All else is said of the place behind them."""
    mask: bytes = b""
    """A bit for each token that may come next, those that end the answer included; empty if it is complete."""
    complete: bool = False
    """Whether nothing more may come."""
    error: str = ""
    """Why the answer cannot go on, or why there is no grammar."""
    seconds: float = 0.0
    """Processor time that this step has taken."""
    nbytes: int = 0
    """Memory that the worker has taken so far."""


def encode_message(message: msgspec.Struct) -> bytes:
    """The message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(body)) + body


def body_length(head: bytes | bytearray) -> int:
    """What the first `HEAD_BYTES` of a message say, in bytes."""
    return int(_HEAD.unpack(head)[0])
