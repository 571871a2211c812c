"""The file of a tape: a header, which names what a replay needs, and frames of entries.

Each frame has a length and two checksums: one over all earlier frames and the length, one also over the body. A frame
is written by one write, so a killed process leaves whole frames. If the last frame is not whole but its length is
right, the end of the file is missing. If any other data does not match its checksum, the file was changed.
"""

import importlib.metadata
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

import msgspec

from runner import __version__, cpu
from runner.errors import RunnerError, UsageError
from runner.logs import Log
from runner.model import OpenedModel
from runner.settings import Settings, flags_of
from runner.sizes import Bound
from runner.tape.tape import Entry, decode_entries

log = Log(__name__)

VERSION = 3
"""The version of the format of headers and entries."""
DECIDING = (
    *("context_tokens", "dtype", "cache", "cache_memory", "memory", "kv_bits", "parallel", "max_gap_s"),
    *("draft", "draft_tokens", "prefill_chunk_tokens", "blas", "kernels", "blas_threads", "no_media"),
    "unproven_models",
)
"""The settings that change what is computed."""


class Identity(msgspec.Struct, frozen=True):
    """The versions, weights and libraries that must be equal in a recording and in its replay."""

    format: int
    runner: str
    mlx: str
    mlx_lm: str
    llguidance: str
    weights: str
    """A digest of the model's text files and of the headers and samples of its weights."""
    device: str
    blas: str
    kernels: str


class Header(msgspec.Struct, frozen=True):
    """The header of a tape: its first frame."""

    model: str
    """The value of `--model`: a name or a directory."""
    identity: Identity
    settings: dict[str, object] = {}
    """The values of the settings in DECIDING. Headers of earlier versions are without them."""


def header_of(settings: Settings, model: OpenedModel) -> Header:
    """Returns the header for an engine with these settings. Raises OSError if the weights cannot be read."""
    chosen = {name: getattr(settings, name) for name in DECIDING}
    return Header(settings.model, _identity(settings, model), {**chosen, "context_tokens": model.context_length})


def settings_of(header: Header) -> Settings:
    """Returns the settings of a recording; only `model` and the fields in DECIDING mean anything. Raises ValueError for
    a value that the flag does not allow: anybody may have written the file."""
    others = {"model": header.model, "models_dir": Path(), "port": 0, "log_level": 0, "watch_parent": False}
    chosen = {name: value for name, value in header.settings.items() if name in DECIDING}
    try:
        settings = msgspec.convert({**chosen, **others}, Settings, dec_hook=lambda _, value: value)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    if header.settings.get("draft_known"):
        raise ValueError("draft_known is True: only earlier versions had --draft-known")
    for name in DECIDING:
        if not _can_be_chosen(name, value := getattr(settings, name)):
            raise ValueError(f"{name} is {value!r}")
    return settings


def _can_be_chosen(name: str, value: object) -> bool:
    flag = flags_of(Settings)[name]
    match value:
        case bool() | None:
            return True
        case Bound(nbytes, percent):
            return 0 <= (nbytes or 0) < 1 << 62 and 0 <= (percent or 0.0) <= 100
        case float():  # in seconds; the flag is in milliseconds
            return flag.least <= value * 1000 <= flag.most
        case int() if not flag.choices:
            return flag.least <= value <= flag.most
    return not flag.choices or str(value) in flag.choices


def check_recordable(settings: Settings, model: OpenedModel) -> None:
    """Raises UsageError if an engine with these settings and this model cannot be recorded."""
    if settings.disk_cache is not None:
        raise UsageError("--record does not record what comes from a disk: leave out --disk-cache")
    if model.family.is_encoder:
        raise UsageError("--record records answers, and this model makes none")
    if (model.has_vision or model.has_audio) and not settings.no_media:
        raise UsageError("--record does not record pictures and sound: add --no-media for a model that takes some")
    check_blas(settings.blas)


def check_blas(choice: str) -> None:
    """Raises UsageError if `choice` is the path of a library: a file must not decide which code is loaded."""
    if choice not in ("auto", "off"):
        raise UsageError(f"--blas {choice} can be neither recorded nor replayed: use auto or off")


def check_identity(header: Header, settings: Settings, model: OpenedModel) -> None:
    """Raises RunnerError for the first difference between the recording and this process, with both values."""
    for what, recorded, found in differences(header, settings, model):
        raise _differs(what, recorded, found)


def _differs(what: str, recorded: object, found: object) -> RunnerError:
    return RunnerError(f"this cannot be replayed here: {what}: recorded with {recorded}, found {found}")


def differences(header: Header, settings: Settings, model: OpenedModel) -> Iterator[tuple[str, object, object]]:
    """Yields each difference between recording and process: the name, the recorded value, and the value here."""
    here = _identity(settings, model)
    for name in Identity.__struct_fields__:
        there, found = getattr(header.identity, name), getattr(here, name)
        if there != found:
            yield name.replace("_", "-"), there, found


def _identity(settings: Settings, model: OpenedModel) -> Identity:
    from runner.device import device  # imports MLX, which must come after the BLAS is loaded

    version = importlib.metadata.version
    return Identity(
        format=VERSION,
        runner=__version__,
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        llguidance=version("llguidance"),
        weights=_digest(model),
        device=device(),
        blas=cpu.detect(settings.blas, settings.blas_threads).name,
        kernels=cpu.find_kernels(settings.kernels).name,
    )


_TEXTS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
_WHOLE_BYTES = 1 << 20
"""Of a smaller file, all bytes are in the digest."""
_SAMPLES, _SAMPLE_BYTES = 64, 1024
_MOST_HEADER_BYTES = 100_000_000


def _digest(model: OpenedModel) -> str:
    """Returns a digest of the model's text files, and of headers and samples of its weights, wherever they lie."""
    digest = blake2b(digest_size=16)
    for name in _TEXTS:
        digest.update(model.file(name) or b"")
    files = {part.file for tensor in model.checkpoint.tensors.values() for part in tensor.parts}
    for path in sorted(files, key=lambda path: path.name):
        with path.open("rb") as file:
            count = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(count, _MOST_HEADER_BYTES)))
            start, end = file.tell(), file.seek(0, os.SEEK_END)
            if end < _WHOLE_BYTES:
                file.seek(start)
                digest.update(file.read())
                continue
            for place in range(start, end, max(1, (end - start) // _SAMPLES)):
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


_MAGIC = b"mlx-runner tape"
_FORM = b"2"  # the version of the format of frames
_HEAD = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
_MOST_FRAME_BYTES = 1 << 30
_MOST_NAMES = 1000


class TapeFile:
    """A new file of a tape, which only its owner may read. Owner: the engine thread."""

    def __init__(self, path: Path, header: Header) -> None:
        """Creates the file: if `path` exists, one with a number after the name. Raises UsageError if that fails."""
        try:
            self.path, self._file = _create(path)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UsageError(f"--record {path}: {reason}; name a file that you may write") from error
        self._crc = 0
        self._open = True
        self._put(_MAGIC + _FORM + self._frame(msgspec.msgpack.encode(header)))

    def write(self, entries: list[Entry]) -> None:
        """Writes a frame. If a frame cannot be written, the recording ends and the engine continues."""
        if self._open:
            self._put(self._frame(msgspec.msgpack.encode(entries)))

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


def _create(path: Path) -> tuple[Path, int]:
    """Creates a file that does not exist yet: an existing one may be the recording of the last process. Raises OSError
    if `path` is a device, a directory or a pipe, beside which nobody expects a file."""
    if path.exists() and not path.is_file():
        raise FileExistsError("this is not a file")
    for number in range(1, _MOST_NAMES):
        found = path if number == 1 else path.with_name(f"{path.name}.{number}")
        with suppress(FileExistsError):
            return found, os.open(found, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    raise FileExistsError(f"{_MOST_NAMES} files of this name exist")


class TapeReader:
    """The reader of a recording."""

    def __init__(self, path: Path) -> None:
        """Reads the header, and checks all frames. Raises RunnerError if the file is no recording, was changed, or
        names a library to load."""
        self._path = path
        self.missing_at: int | None = None
        """The byte at which an incomplete last frame begins; None if the last frame is complete."""
        try:
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise RunnerError(f"{path}: not a recording of mlx-runner --record")
                if file.read(len(_FORM)) != _FORM:
                    raise RunnerError(f"{path}: a recording of another version of mlx-runner, or damaged in byte 15")
            frames = self._frames()
            self.header = msgspec.msgpack.decode(next(frames), type=Header)
            for _ in frames:
                pass
            if self.header.identity.format != VERSION:
                raise _differs("format", self.header.identity.format, VERSION)
            self.settings = settings_of(self.header)
            """The recorded settings; only `model` and the fields in DECIDING mean anything."""
            check_blas(self.settings.blas)
        except OSError as error:
            raise RunnerError(f"{path}: {(error.strerror or str(error)).lower()}") from error
        except StopIteration:
            raise RunnerError(f"{path}: the recording ends within its header") from None
        except (ValueError, msgspec.DecodeError) as error:
            raise RunnerError(f"{path}: the header of the recording is unreadable: {error}") from None

    def entries(self) -> Iterator[Entry]:
        """Yields the entries after the header. Raises RunnerError for an entry that cannot be decoded."""
        frames = self._frames()
        next(frames)
        for frame in frames:
            try:
                yield from decode_entries(frame)
            except (ValueError, msgspec.DecodeError) as error:
                raise RunnerError(f"{self._path}: unreadable: {error}") from None

    def _frames(self) -> Iterator[bytes]:
        """Yields the complete frames. Raises RunnerError for a changed frame."""
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
