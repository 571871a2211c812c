"""Messages between the runner and its grammar processes, in MessagePack."""

import struct

import msgspec

from runner.process.child import framed

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
    return framed(msgspec.msgpack.encode(message))
