"""The file of a tape: frames, each with its length and two checksums that cover all frames before it: one with the
length, one with the body.

A frame is one write, so a process that is killed leaves whole frames. Only the end of a file can be missing: a frame
that is not whole, though its length is right. Everything else that does not fit to its checksum was changed.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from zlib import crc32

import msgspec

from runner.engine.ports import Value, What
from runner.errors import RunnerError, UsageError
from runner.logs import Log
from runner.settings import CACHE_KINDS, DTYPES, MOST_DRAFT_TOKENS, MOST_PARALLEL

log = Log(__name__)

# --- What stands on a tape: a header, then values of the kinds of `What`. MessagePack, with bounds.

VERSION = 2
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
    draft_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_DRAFT_TOKENS)] | None
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
    """The events outside between two slices."""

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


_MAGIC = b"mlx-runner tape"
_FORM = b"2"  # of the frames
_HEAD = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
_MOST_FRAME_BYTES = 1 << 30
_MOST_NAMES = 1000


class TapeFile:
    """A new file, which only its owner may read. Owner: the engine thread."""

    def __init__(self, path: Path, header: Header) -> None:
        """Creates the file; if there is one, beside it, with a number behind the name. Raises UsageError if it cannot
        be written."""
        try:
            self.path, self._file = _create(path)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UsageError(f"--record {path}: {reason}; name a file that you may write") from error
        self._crc = 0
        self._open = True
        self.nbytes = self.writes = 0
        """Bytes and writes so far."""
        self._put(_MAGIC + _FORM + self._frame(encode(header)))

    def write(self, entries: list[Entry]) -> None:
        """Writes a frame. The recording ends with the first one that cannot be written; the engine goes on."""
        if self._open:
            self._put(self._frame(encode(entries)))

    def _frame(self, body: bytes) -> bytes:
        length = crc32(_LENGTH.pack(len(body)), self._crc)
        self._crc = crc32(body, length)
        return _HEAD.pack(len(body), length, self._crc) + body

    def _put(self, data: bytes) -> None:
        try:
            why = "" if os.write(self._file, data) == len(data) else "there is no room for more"
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            log.warning("the recording ends here", file=str(self.path), why=why)
            self._open = False
            with suppress(OSError):
                os.close(self._file)
        self.nbytes += len(data)
        self.writes += 1


def _create(path: Path) -> tuple[Path, int]:
    """Creates a file that does not exist yet. Never overwrites one: it may be what the last process left behind. Raises
    OSError beside a device, a directory or a pipe, in whose place nobody expects a file."""
    if path.exists() and not path.is_file():
        raise FileExistsError("this is not a file")
    for number in range(1, _MOST_NAMES):
        found = path if number == 1 else path.with_name(f"{path.name}.{number}")
        with suppress(FileExistsError):
            return found, os.open(found, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    raise FileExistsError(f"{_MOST_NAMES} files of this name exist")


def check_blas(choice: str) -> None:
    """Raises UsageError for a library by its path: a file must not say which code is loaded."""
    if choice not in ("auto", "off"):
        raise UsageError(f"--blas {choice} is not recorded, nor replayed: use auto or off")


class TapeReader:
    """A file that was recorded."""

    def __init__(self, path: Path) -> None:
        """Reads the header, and checks all frames. Raises RunnerError for a file that is no tape, or was changed, and
        for a header that asks for code."""
        self._path = path
        self.missing_at: int | None = None
        """Where the frame begins whose end is missing; None if the last one is whole."""
        try:
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise RunnerError(f"{path}: no recording of mlx-runner --record")
                if file.read(len(_FORM)) != _FORM:
                    raise RunnerError(f"{path}: a recording of another version of mlx-runner, or damaged in byte 15")
            frames = self._frames()
            self.header = header_decoder.decode(next(frames))
            for _ in frames:
                pass
            check_blas(self.header.choices.blas)
        except OSError as error:
            raise RunnerError(f"{path}: {(error.strerror or str(error)).lower()}") from error
        except StopIteration:
            raise RunnerError(f"{path}: the recording ends within its header") from None
        except msgspec.DecodeError as error:
            raise RunnerError(f"{path}: the header of the recording is unreadable: {error}") from None

    def entries(self) -> Iterator[Entry]:
        """Yields the values behind the header. Raises RunnerError for what is no value."""
        frames = self._frames()
        next(frames)
        for frame in frames:
            try:
                yield from decode_entries(frame)
            except (ValueError, msgspec.DecodeError) as error:
                raise RunnerError(f"{self._path}: unreadable: {error}") from None

    def _frames(self) -> Iterator[bytes]:
        """Yields the whole frames. Raises RunnerError for one that was changed."""
        crc, at = 0, len(_MAGIC + _FORM)
        with self._path.open("rb") as file:
            file.seek(at)
            while head := file.read(_HEAD.size):
                if len(head) == _HEAD.size:
                    length, of_length, of_body = _HEAD.unpack(head)
                    crc = crc32(_LENGTH.pack(length), crc)
                    if crc != of_length or length > _MOST_FRAME_BYTES:
                        raise RunnerError(f"{self._path}: damaged in the {len(head)} bytes from byte {at}")
                    body = file.read(length)
                    if len(body) == length:
                        crc = crc32(body, crc)
                        if crc != of_body:
                            raise RunnerError(f"{self._path}: damaged in the {len(head) + length} bytes from byte {at}")
                        yield body
                        at += len(head) + length
                        continue
                self.missing_at = at
                return
