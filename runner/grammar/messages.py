"""The messages between the runner and its grammar processes, as MessagePack."""

import struct

import msgspec

from runner.process.child import framed

ORDER = struct.Struct("<cI")
"""The form of an order to the fork server: an action, and the number by which the runner names the worker."""
FORK, KILL, SLOW = b"F", b"K", b"S"
"""The actions: fork a worker for the descriptor sent with the order; kill a worker; lower the priority of a worker."""
COMPILE_S = 5.0
"""The time limit for compiling. A timer of the kernel then ends the worker."""


class CompilerSetup(msgspec.Struct, frozen=True):
    """The first message to the fork server. The reply is a `State`; `error` is empty unless the server cannot serve."""

    files: dict[str, bytes]
    """The name of each text file of the model -> its path, in the bytes of the file system."""
    merge_eos: bool
    """The argument of `open_tokenizer` with this name."""
    vocab_size: int
    """The number of tokens in the model's vocabulary; 0 if unknown."""


class Compile(msgspec.Struct, frozen=True):
    """The first message to a worker. The reply is the `State` at the beginning of an answer."""

    format: bytes
    """A `Format` as JSON."""
    memory_bytes: int
    """The most memory that the worker may allocate after this message."""


class Follow(msgspec.Struct, frozen=True):
    """A message to a worker: tokens with which the answer continues. The reply is a `State`."""

    tokens: list[int]
    restart: bool = False
    """True if the answer starts again: `tokens` are its first tokens."""
    tries: bool = False
    """True if the tokens are only tried: the answer stays at its current position, and the reply has `tried`."""


class State(msgspec.Struct, frozen=True):
    """The position of an answer in its grammar."""

    forced: list[int] = []
    """The next tokens, about which the grammar leaves no choice. The other fields describe the position after them."""
    mask: bytes = b""
    """One bit for each token, set if the token may come next or may end the answer. Empty if `complete`."""
    complete: bool = False
    """True if no further token may come."""
    error: str = ""
    """The reason why the answer cannot continue, or why the format did not compile; empty if there is none."""
    left_out: str = ""
    """In the first state of an answer: the first part of the format that is not enforced, and why; else empty."""
    tried: list[bytes | int] | None = None
    """For each tried token, the mask of the tokens that may come after it, or the one forced token. The list ends at
    the first token after which no token may come. The fields above are then empty. None if no tokens were tried."""
    seconds: float = 0.0
    """The processor time that the worker needed for this state."""
    nbytes: int = 0
    """The number of bytes that the worker has allocated up to now."""


def encode_message(message: msgspec.Struct) -> bytes:
    """Returns the bytes to send: the length of the message, then the message."""
    return framed(msgspec.msgpack.encode(message))
