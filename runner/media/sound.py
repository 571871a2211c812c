"""Decodes the bytes of a sound to rows for a tower, with numpy: reads samples, brings them to RATE, cuts them into
pieces. Runs in the process that decodes.

The arithmetic is that of Ollama's runner (docs/internals/wire.md, section 13). The logarithmic spectra equal, bit for
bit, those of transformers' feature extractor for Gemma 4.
"""

from collections.abc import Callable, Iterator
from functools import cache
from io import BytesIO
from math import ceil, gcd
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from runner.errors import MediaError
from runner.media.sound_header import (
    FRAME,
    HOP,
    LONGEST,
    MEL_BINS,
    MOST_CHANNELS,
    MOST_RATE,
    MOST_SECONDS,
    RATE,
    WAV,
    SoundHeader,
    resampled,
)

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
_BLOCK_FRAMES = 1 << 17
_PASS_FRAMES = 128
"""The least number of inputs, on average, that one pass of the loop over phases in `to_rate` resamples."""
_MOST_VALUES = 1 << 21
"""The most samples, over all channels, that `mono` converts at once."""
_MOST_WEIGHTS = 1 << 17
"""The most weights of the resampling kernel that are computed at once."""


def decode_sound(data: bytes, header: SoundHeader, frame_samples: int) -> tuple[list[int], Floats]:
    """Returns the number of rows of each piece of a sound, and the rows, piece after piece.

    `data` is the samples of a WAV, or a whole file of another format. If `frame_samples` is 0, a row is a logarithmic
    spectrum [MEL_BINS], and a piece has at most 30 s. Otherwise, a row is `frame_samples` samples, and there is one
    piece. Raises MediaError for a sound that is too short or damaged.
    """
    if header.is_exact:
        samples = to_rate(lambda start, stop: mono(data, header, start, stop), header.frames, header.rate)
    else:
        frames, rate = _read_file(data, header.format)
        samples = to_rate(lambda start, stop: frames[start:stop], len(frames), rate)
    if not np.isfinite(samples).all():
        raise MediaError("wav: a sample is not a finite number")
    if frame_samples:
        if not len(samples):
            raise MediaError("audio too short")
        rows = -(-len(samples) // frame_samples)
        return [rows], np.pad(samples, (0, rows * frame_samples - len(samples))).reshape(rows, frame_samples)
    pieces = [spectra(piece) for piece in np.split(samples, np.cumsum(cut_samples(samples))[:-1])]
    joined = np.concatenate(pieces)
    if not np.isfinite(joined).all():
        raise MediaError("wav: the samples are too large")
    return [len(piece) for piece in pieces], joined


@cache
def decode_silence() -> None:
    """Decodes silence once, to load libraries, buffers and tables before the limits of a sound apply."""
    silence = SoundHeader(WAV, RATE // 2, 1, 16, False, 0, 4 * FRAME)
    decode_sound(bytes(silence.stop), silence, 0)


def mono(data: bytes, header: SoundHeader, start: int, stop: int) -> Floats:
    """Returns the mean of the channels of each frame from `start` to `stop`. Scales integers to -1 to 1."""
    most = _MOST_VALUES // header.channels
    if stop - start > most:
        return np.concatenate([mono(data, header, at, min(at + most, stop)) for at in range(start, stop, most)])
    width = header.frame_bytes
    raw = np.frombuffer(data, np.uint8, (stop - start) * width, start * width)
    values: Doubles
    means: Doubles
    if header.floats:
        with np.errstate(invalid="ignore"):
            values = raw.view("<f4").astype(np.float64)
    elif header.bits == 8:
        values = (raw.astype(np.float64) - 128) / 128
    elif header.bits == 24:
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = raw.reshape(-1, 3)
        values = (wide.view("<i4")[:, 0] >> 8) / float(1 << 23)
    else:
        values = raw.view(f"<i{header.bits // 8}") / float(1 << (header.bits - 1))
    with np.errstate(over="ignore", invalid="ignore"):
        means = values.reshape(-1, header.channels).mean(axis=1)
        return means.astype(np.float32)


def _read_file(data: bytes, name: str) -> tuple[Floats, int]:
    """Returns the mean of the channels of each frame of a file, and the rate. Raises MediaError for a bad file."""
    import soundfile

    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            return _frames(file.read, file.channels, file.samplerate), file.samplerate
    except (MediaError, MemoryError):
        raise
    except Exception as error:  # libsndfile raises errors of many types
        raise MediaError(f"decode audio: damaged {name}: its contents cannot be decoded") from error


def _frames(read: Callable[..., Floats], channels: int, rate: int) -> Floats:
    """Returns the mean of the channels of each frame of a file. `read` returns the next block of frames."""
    if not (0 < channels <= MOST_CHANNELS and 0 < rate <= MOST_RATE):
        raise MediaError(
            f"decode audio: {channels} channels at {rate} Hz exceed the limit of {MOST_CHANNELS} channels at"
            f" {MOST_RATE} Hz"
        )
    found, count = [np.zeros(0, np.float32)], 0
    while len(block := read(_BLOCK_FRAMES, np.float32, always_2d=True)):
        count += len(block)
        if count > MOST_SECONDS * rate:
            raise MediaError(f"audio longer than {MOST_SECONDS} seconds")
        found.append(block.mean(axis=1, dtype=np.float64).astype(np.float32))
    return np.concatenate(found)


_ZEROS = 16
_ROLL_OFF = 0.9
_BETA = 9.0
_STEPS = 8192


def to_rate(read: Callable[[int, int], Floats], frames: int, rate: int) -> Floats:
    """Returns `frames` samples, resampled from `rate` to RATE by a windowed sinc. Gain is 1, at both ends too.
    `read(start, stop)` returns the samples of one block."""
    if rate == RATE or frames <= 1:
        starts = range(0, frames, _BLOCK_FRAMES)
        blocks = [read(start, min(start + _BLOCK_FRAMES, frames)) for start in starts]
        return np.concatenate([np.zeros(0, np.float32), *blocks])
    reach = _ZEROS / (_ROLL_OFF * min(1.0, RATE / rate))
    # A cycle is `phases` outputs, over which the centre moves by `step` inputs. Unusual rates have many phases.
    step, phases = rate // gcd(rate, RATE), RATE // gcd(rate, RATE)
    count = resampled(frames, rate)
    found = np.empty(count, np.float32)
    all_turns = -(-count // phases)
    turns = min(all_turns, max(1, max(_BLOCK_FRAMES, _PASS_FRAMES * phases) // step))  # the number of cycles in a block
    taps, margin = 2 * ceil(reach) + 1, ceil(reach) + 2
    for turn in range(0, all_turns, turns):
        first = turn * step - margin
        last = (turn + turns) * step + margin
        low, high = max(first, 0), min(last, frames)
        inputs, inside = np.zeros((2, last - first))
        if high > low:
            inputs[low - first : high - first] = read(low, high)
            inside[low - first : high - first] = 1
        whole = first == low and last == high
        heard, there = (np.lib.stride_tricks.sliding_window_view(each, taps) for each in (inputs, inside))
        kernels = _kernels(rate, reach, taps, min(phases, count - turn * phases))
        for place, (start, weights) in enumerate(kernels, turn * phases):
            outputs = min(turns, -(-(count - place) // phases))
            at = slice(start + margin, start + margin + outputs * step, step), slice(len(weights))
            sums = heard[at] @ weights
            gains = weights.sum() if whole else there[at] @ weights
            found[place : place + outputs * phases : phases] = sums / gains
    return found


def _kernels(rate: int, reach: float, taps: int, count: int) -> Iterator[tuple[int, Doubles]]:
    """Yields, for each of `count` outputs, the place of its first input and the weights of at most `taps` inputs."""
    steps, most = np.arange(taps), max(1, _MOST_WEIGHTS // taps)
    for first in range(0, count, most):
        centres = np.arange(first, min(first + most, count)) * rate / RATE
        starts = np.ceil(centres - reach)
        counts = np.floor(centres + reach) + 1 - starts
        weights = _weights(np.abs(starts[:, None] + steps - centres[:, None]) / reach)
        for start, length, row in zip(starts.astype(int).tolist(), counts.astype(int).tolist(), weights, strict=True):
            yield start, row[:length]


def _weights(distances: Doubles) -> Doubles:
    """Returns the kernel's values at `distances`, from 0 (its centre) to 1. Interpolates between entries of a table."""
    places = distances * _STEPS
    lower = np.minimum(places.astype(np.int64), _STEPS - 1)
    share = places - lower
    table = _table()
    return np.where(distances < 1, table[lower] * (1 - share) + table[lower + 1] * share, 0.0)


@cache
def _table() -> Doubles:
    distances = np.arange(_STEPS + 1) / _STEPS
    window = np.i0(_BETA * np.sqrt(1 - distances**2)) / np.i0(_BETA)
    return np.sinc(_ZEROS * distances) * window


_AROUND = 2 * RATE
_QUIET = RATE // 10


def cut_samples(samples: Floats) -> list[int]:
    """Returns the lengths of the pieces of a sound: the fewest pieces of at most LONGEST samples, about equally long.
    Each cut is in the quietest tenth of a second near the intended end of a piece."""
    lengths = []
    for left in range(-(-len(samples) // LONGEST), 1, -1):
        count = len(samples)
        target = count // left
        first = max(target - _AROUND, count - (left - 1) * LONGEST)
        last = min(target + _AROUND, LONGEST)
        lengths.append(_quietest(samples[first:last]) + first)
        samples = samples[lengths[-1] :]
    return [*lengths, len(samples)]


def _quietest(samples: Floats) -> int:
    """Returns the middle of the tenth of a second with the least energy; the last one if several are equal."""
    if len(samples) <= _QUIET:
        return len(samples) // 2
    energy = samples.astype(np.float64) ** 2
    changes = np.empty(2 * (len(samples) - _QUIET))
    changes[0::2] = energy[_QUIET:]
    changes[1::2] = -energy[:-_QUIET]
    sums = np.cumsum(np.concatenate([energy[:_QUIET], changes]))[_QUIET - 1 :: 2]
    return len(sums) - 1 - int(np.argmin(sums[::-1])) + _QUIET // 2


_FFT = 512
_FLOOR = 1e-3


def spectra(samples: Floats) -> Floats:
    """Returns logarithmic spectra [frames, MEL_BINS]. Raises MediaError for fewer samples than 161: too few for one."""
    padded = np.pad(samples, (FRAME // 2, 0))
    if len(padded) <= FRAME:
        raise MediaError("audio too short")
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME + 1)[::HOP, :-1]
    with np.errstate(over="ignore", invalid="ignore"):
        sizes = np.abs(np.fft.rfft(frames * _window(), _FFT))
        return np.log(sizes @ _filters() + _FLOOR).astype(np.float32)


@cache
def _window() -> Floats:
    return np.hanning(FRAME + 1)[:-1].astype(np.float32)


@cache
def _filters() -> Doubles:
    """Returns triangular mel filters [257 frequencies, MEL_BINS], on HTK's scale and not normalized."""

    def mel(hertz: float) -> float:
        return float(2595.0 * np.log10(1.0 + hertz / 700.0))

    edges = 700.0 * (np.power(10, np.linspace(mel(0.0), mel(RATE / 2), MEL_BINS + 2) / 2595.0) - 1.0)
    slopes = edges[None] - np.linspace(0, RATE // 2, _FFT // 2 + 1)[:, None]
    widths = np.diff(edges)
    falling, rising = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    return np.maximum(np.zeros(1), np.minimum(falling, rising))
