"""Messages between the runner and its grammar processes, in MessagePack."""

import struct

import msgspec

from runner.process.child import framed

ORDER = struct.Struct("<cI")
"""An order to the fork server: the action, and the runner's number for the worker."""
FORK, KILL, SLOW = b"F", b"K", b"S"
"""Fork a worker that serves the descriptor sent along; kill it; lower its priority below that of other processes."""
COMPILE_S = 5.0
"""The time limit for compiling. After it, the kernel ends the worker."""


class CompilerSetup(msgspec.Struct, frozen=True):
    """The first message to the fork server. The answer is a `State`, whose `error` names any fault of it."""

    files: dict[str, bytes]
    """The paths of the model's text files by name, as bytes of the file system."""
    merge_eos: bool
    """The argument of `open_tokenizer`."""
    vocab_size: int
    """The number of tokens in the model's vocabulary; 0 if unknown."""


class Compile(msgspec.Struct, frozen=True):
    """The first message to a worker. The answer is the `State` at the beginning of an answer."""

    format: bytes
    """A `Format` as JSON."""
    memory_bytes: int
    """The limit on the memory that the worker may allocate from here on."""


class Follow(msgspec.Struct, frozen=True):
    """Tokens with which an answer continues. The reply is a `State`."""

    tokens: list[int]
    restart: bool = False
    """True if `tokens` follow the beginning of the answer, not its current position."""
    tries: bool = False
    """True if the answer stays at its current position. The state then has `tried`."""


class State(msgspec.Struct, frozen=True):
    """The position of an answer in its grammar."""

    forced: list[int] = []
    """Tokens about which the grammar leaves no choice. All other fields describe the position after them."""
    mask: bytes = b""
    """One bit per token, set if the token may come next or may end the answer; empty if complete."""
    complete: bool = False
    """True if nothing more may come."""
    error: str = ""
    """The reason why the answer cannot go on, or why there is no grammar."""
    left_out: str = ""
    """At the beginning of an answer: why parts of schemas were left out; empty if everything is enforced."""
    tried: list[bytes | int] | None = None
    """The mask, or the one token, that may come after each tried token, up to the first after which nothing may come.
    All fields above are empty then; None if nothing was tried."""
    seconds: float = 0.0
    """The processor time of this step."""
    nbytes: int = 0
    """The memory that the worker has allocated so far."""


def encode_message(message: msgspec.Struct) -> bytes:
    """Returns the message with its length in front."""
    return framed(msgspec.msgpack.encode(message))
