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


class Follow(msgspec.Struct, frozen=True):
    """Tokens with which the answer continues; answered with a `State`."""

    tokens: list[int]
    restart: bool = False
    """True if `tokens` follow the beginning of the answer, not its current position."""
    tries: bool = False
    """True if the answer stays at its current position: the state says what may come after `tokens`."""


class State(msgspec.Struct, frozen=True):
    """The position of an answer in its grammar."""

    forced: list[int] = []
    """Tokens about which the grammar leaves no choice. All other fields describe the position after them."""
    mask: bytes = b""
    """One bit per token, set for those that may come next, including those that end the answer; empty if complete."""
    complete: bool = False
    """True if nothing more may come."""
    error: str = ""
    """The reason why the answer cannot go on, or why there is no grammar."""
    left_out: str = ""
    """The fault of the parts of schemas that cannot be enforced and were left out, at the beginning of an answer; empty
    if all are enforced."""
    tried: list[bytes | int] | None = None
    """What may come after each of the tokens that were tried, as far as they may come and others after them: a mask,
    or the one token. All fields above are empty then; None if nothing was tried."""
    seconds: float = 0.0
    """Processor time of this step."""
    nbytes: int = 0
    """Memory that the worker has allocated so far."""


def encode_message(message: msgspec.Struct) -> bytes:
    """Returns the message with its length in front."""
    return framed(msgspec.msgpack.encode(message))
