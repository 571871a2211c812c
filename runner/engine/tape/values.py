"""What stands on a tape: a header, then values of the kinds of `What`. MessagePack, with bounds."""

from typing import Annotated

import msgspec

from runner.engine.tape.interface import Value, What

VERSION = 1
_MOST_TOKENS = 1 << 24
_Text = Annotated[str, msgspec.Meta(max_length=1 << 24)]
_Tokens = Annotated[list[int], msgspec.Meta(max_length=_MOST_TOKENS)]


class Identity(msgspec.Struct, frozen=True):
    """What must be equal where a tape is replayed: in words, each with its value."""

    format: int
    runner: str
    mlx: str
    mlx_lm: str
    llguidance: str
    weights: str
    """A digest of headers, texts and samples of the weights."""
    device: str
    blas: str


class Choices(msgspec.Struct, frozen=True):
    """The settings that decide what is computed; the names are those of `Settings`."""

    context_tokens: int
    dtype: str
    cache: str
    cache_memory_bytes: int | None
    cache_memory_percent: float | None
    memory_bytes: int | None
    memory_percent: float | None
    kv_bits: int | None
    parallel: int
    max_gap_s: float
    draft: str
    draft_tokens: int | None
    draft_known: bool
    prefill_chunk_tokens: int | None
    blas: str
    blas_threads: int | None
    no_media: bool


class Header(msgspec.Struct, frozen=True):
    """The first frame of a tape."""

    model: str
    """The name or the directory that `--model` named."""
    identity: Identity
    choices: Choices


class Arrived(msgspec.Struct, frozen=True, array_like=True):
    """A request that left the mailbox."""

    number: int
    prompt: _Tokens
    max_tokens: int
    sampling: list[int | float | bool]
    """The fields of `SamplingOptions`, with the seed that was drawn."""
    stops: Annotated[list[_Text], msgspec.Meta(max_length=1 << 16)]
    metered: bool
    most_drafts: int | None
    format: bytes
    """As JSON; empty for none."""


class Compiled(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that is compiled, or was refused."""

    number: int
    error: str
    """Empty if there is none."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What happened outside between two slices."""

    arrived: list[Arrived] = []
    left: list[int] = []
    """The numbers of requests whose clients are gone."""
    compiled: list[Compiled] = []


Entry = tuple[What, Value]
encode = msgspec.msgpack.Encoder().encode
header_decoder = msgspec.msgpack.Decoder(Header)
turn_decoder = msgspec.msgpack.Decoder(Turn)
_entries_decoder = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
_value_decoder = msgspec.msgpack.Decoder()


def decode_entries(data: bytes) -> list[Entry]:
    """Returns the entries of a frame. Raises ValueError if it holds anything else."""
    return [(What(what), _value_decoder.decode(value)) for what, value in _entries_decoder.decode(data)]
