"""What stands on a tape: a header, then values of the kinds of `What`. MessagePack, with bounds."""

from typing import Annotated

import msgspec

from runner.cache import CACHE_KINDS
from runner.drafts.policy import MOST_TOKENS
from runner.engine.tape.interface import Value, What
from runner.settings import DTYPES, MOST_PARALLEL

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


def _one_of(*words: str) -> msgspec.Meta:
    return msgspec.Meta(pattern=rf"\A({'|'.join(words)})\Z")


_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]


class Choices(msgspec.Struct, frozen=True):
    """The settings that decide what is computed; the names are those of `Settings`, the bounds those of the flags."""

    context_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
    dtype: Annotated[str, _one_of(*DTYPES)]
    cache: Annotated[str, _one_of(*CACHE_KINDS)]
    cache_memory_bytes: _Bytes | None
    cache_memory_percent: _Percent | None
    memory_bytes: _Bytes | None
    memory_percent: _Percent | None
    kv_bits: Annotated[int, msgspec.Meta(ge=4, le=8, multiple_of=4)] | None
    parallel: Annotated[int, msgspec.Meta(ge=1, le=MOST_PARALLEL)]
    max_gap_s: Annotated[float, msgspec.Meta(gt=0, le=60)]
    draft: _Text
    draft_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] | None
    draft_known: bool
    prefill_chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None
    blas: _Text
    blas_threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None
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
    sampling: list[int | float | bool | list[int]]
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
