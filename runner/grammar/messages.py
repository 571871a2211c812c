"""Messages between the runner and its grammar processes: MessagePack, preceded by its length."""

import struct
from typing import TypeVar

import msgspec

Message = TypeVar("Message", bound=msgspec.Struct)
_HEAD = struct.Struct("<I")
ORDER = struct.Struct("<cI")
"""An order to the fork server: the action, and the runner's number for the worker."""
FORK, KILL, SLOW = b"F", b"K", b"S"
"""Fork a worker that serves the descriptor sent along; kill it; lower its priority."""
COMPILE_S = 5.0
"""Time limit for compiling; after it, the kernel ends the worker."""


class CompilerSetup(msgspec.Struct, frozen=True):
    """The first message to the fork server; answered with a `State`, whose `error` says what is wrong with it."""

    files: dict[str, bytes]
    """The paths of the model's text files by name, as bytes of the file system."""
    merge_eos: bool
    """As for `open_tokenizer`."""
    vocab_size: int
    """Vocabulary size of the model, in tokens; 0 if unknown."""


class Compile(msgspec.Struct, frozen=True):
    """The first message to a worker; answered with the `State` at the beginning of an answer."""

    format: bytes
    """A `Format` as JSON."""
    memory_bytes: int
    """The limit on what the worker may allocate from here on."""


def encode_message(message: msgspec.Struct) -> bytes:
    """Returns the message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(body)) + body


class Inbox:
    """The messages of a connection, as their bytes arrive."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> None:
        """Adds bytes that were received."""
        self._received += data

    def take(self, kind: type[Message]) -> Message | None:
        """Returns the next message, or None until all of it has come. Raises msgspec.DecodeError if it is not of this
        kind."""
        if len(self._received) < _HEAD.size:
            return None
        end = _HEAD.size + int(_HEAD.unpack(self._received[: _HEAD.size])[0])
        if len(self._received) < end:
            return None
        message = msgspec.msgpack.decode(self._received[_HEAD.size : end], type=kind)
        del self._received[:end]
        return message
