"""Reads the form and the length of a sound, by a bounded walk over the chunks of its file.

Errors are worded as in Ollama's runner (docs/internals/wire.md, section 13), unless only this runner refuses a file.
"""

import struct
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

from runner.errors import MediaError
from runner.media.header import MOST_PARTS, is_mpeg

RATE = 16_000
"""The number of samples in a second of the sounds that towers encode."""
LONGEST = 30 * RATE
"""The most samples of a piece, in families that cut sounds into pieces."""
HOP, FRAME = 160, 320
"""HOP is the distance from one spectrum to the next, FRAME the length of a spectrum; both are in samples."""
MEL_BINS = 128
"""The number of values in a spectrum."""
MOST_SECONDS = 600
WAV = "WAV"
OTHERS = ("MP3", "FLAC", "Ogg")
"""The formats that need the package `soundfile`."""
_USUAL_RATE = 48_000
_LEAST_SECOND_BYTES = 100
"""The least bytes of a file for a second of sound at `_USUAL_RATE`: FLAC of silence has nearly twice as many."""
MOST_RATE = 768_000
MOST_CHANNELS = 64
_LEAST_BYTES = 12
_FMT_BYTES = 16
_EXTENSIBLE, _EXTENSIBLE_BYTES = 0xFFFE, 26
_INTEGERS, _FLOATS = 1, 3
_FORMS = {(_INTEGERS, 8), (_INTEGERS, 16), (_INTEGERS, 24), (_INTEGERS, 32), (_FLOATS, 32)}
"""The supported (format, bits) of the samples of a WAV."""


class SoundHeader(NamedTuple):
    """The form of a sound, and the place of its samples in the file. For a format other than WAV, the values are
    bounds: only decoding finds the true values."""

    format: str
    """WAV, or one of OTHERS."""
    rate: int
    """The number of samples in a second of each channel."""
    channels: int
    bits: int
    floats: bool
    """True if samples are floating-point numbers, False if they are integers."""
    start: int
    stop: int
    """`start` and `stop` bound the bytes of the file that hold the samples."""

    @property
    def is_exact(self) -> bool:
        """True if the length of the sound follows from the header."""
        return self.format == WAV

    @property
    def frame_bytes(self) -> int:
        """The bytes of one frame: one sample of each channel."""
        return self.channels * self.bits // 8

    @property
    def frames(self) -> int:
        """The number of samples of each channel; an upper bound if the header is not exact."""
        if not self.is_exact:
            return self.rate * min(MOST_SECONDS, 1 + (self.stop - self.start) // _LEAST_SECOND_BYTES)
        return (self.stop - self.start) // self.frame_bytes

    @property
    def samples(self) -> int:
        """The number of samples after resampling to RATE."""
        return resampled(self.frames, self.rate)


def resampled(frames: int, rate: int) -> int:
    """Returns the number of samples after resampling `frames` samples from `rate` to RATE."""
    return frames if frames <= 1 else -(-frames * RATE // rate)


def read_sound_header(data: bytes) -> SoundHeader:
    """Returns the header of a sound. Raises MediaError for a damaged, too long or unsupported sound."""
    if other := _other_format(data):
        if not _has_soundfile():
            raise MediaError(
                f"unrecognized audio format: {other} needs soundfile (pip install soundfile); or send a WAV"
            )
        return SoundHeader(other, _USUAL_RATE, 1, 32, True, 0, len(data))
    if len(data) < _LEAST_BYTES or not data.startswith(b"RIFF") or data[8:12] != b"WAVE":
        raise MediaError("unrecognized audio format")
    fmt, (start, stop) = _chunks(data)
    if len(fmt) < _FMT_BYTES:
        raise MediaError("wav: fmt chunk too short")
    form, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", fmt)
    if not channels or not rate:
        raise MediaError(f"wav: invalid fmt: {channels} channels at {rate} Hz")
    if form == _EXTENSIBLE and len(fmt) >= _EXTENSIBLE_BYTES:
        (form,) = struct.unpack_from("<H", fmt, 24)
    if (form, bits) not in _FORMS:
        raise MediaError(f"wav: unsupported format {form} with {bits} bits")
    if channels > MOST_CHANNELS or rate > MOST_RATE:
        raise MediaError(
            f"wav: {channels} channels at {rate} Hz exceed the limit of {MOST_CHANNELS} channels at {MOST_RATE} Hz"
        )
    header = SoundHeader(WAV, rate, channels, bits, form == _FLOATS, start, stop)
    if header.frames > MOST_SECONDS * rate:
        raise MediaError(f"audio longer than {MOST_SECONDS} seconds")
    return header


def _other_format(data: bytes) -> str:
    """Returns the format in OTHERS that the first bytes of a file show; "" for any other file."""
    if data.startswith(b"fLaC"):
        return "FLAC"
    if data.startswith(b"OggS"):
        return "Ogg"
    has_layer = int.from_bytes(data[:2]) & 0x0006
    return "MP3" if (is_mpeg(data) and has_layer) or data.startswith(b"ID3") else ""


@cache
def _has_soundfile() -> bool:
    return find_spec("soundfile") is not None


def _chunks(data: bytes) -> tuple[bytes, tuple[int, int]]:
    """Returns the content of the last `fmt ` chunk of a WAV, and the (start, stop) of the last `data` chunk's content.
    A chunk that claims more bytes than the file has is cut. Raises MediaError for a damaged WAV."""
    fmt: bytes | None = None
    samples: tuple[int, int] | None = None
    place, parts = _LEAST_BYTES, 0
    while place + 8 <= len(data):
        parts += 1
        if parts > MOST_PARTS:
            raise MediaError(f"wav: more than {MOST_PARTS} chunks")
        name, size = struct.unpack_from("<4sI", data, place)
        start, stop = place + 8, min(place + 8 + size, len(data))
        if name == b"fmt ":
            fmt = data[start : min(stop, start + _EXTENSIBLE_BYTES)]
        elif name == b"data":
            samples = (start, stop)
        place = stop + size % 2
    if fmt is None:
        raise MediaError("wav: no fmt chunk")
    if samples is None:
        raise MediaError("wav: no data chunk")
    return fmt, samples
