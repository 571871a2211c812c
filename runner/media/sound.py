"""Bytes to rows of sound, with numpy: samples, at one rate, in pieces, as a tower takes them. Runs in the process that
decodes.

The arithmetic is that of Ollama's runner (docs/internals/wire.md, 13); the logarithmic spectra equal those of
transformers' feature extractor for Gemma 4 bit for bit.
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
"""The least inputs, on average, that a pass of Python resamples."""
_MOST_VALUES = 1 << 21
"""The most samples of all channels that are converted at once."""
_MOST_WEIGHTS = 1 << 17
"""The most weights that are computed at once."""


def decode_sound(data: bytes, header: SoundHeader, frame_samples: int) -> tuple[list[int], Floats]:
    """Returns the number of rows of each piece of a sound, and the rows, piece after piece.

    `data` are the samples of a WAV alone, or another file. A row is a logarithmic spectrum [MEL_BINS], in pieces of at
    most 30 s; or, unless `frame_samples` is 0, that number of samples, in one piece. Raises MediaError for a sound that
    is too short or damaged.
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
    """Decodes silence once, so that libraries, their buffers and tables count towards the limits of no sound."""
    silence = SoundHeader(WAV, RATE // 2, 1, 16, False, 0, 4 * FRAME)
    decode_sound(bytes(silence.stop), silence, 0)


def mono(data: bytes, header: SoundHeader, start: int, stop: int) -> Floats:
    """Returns the frames from `start` to `stop`, each the mean of its channels, between -1 and 1."""
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
    """Returns the frames of a file, each the mean of its channels, and their rate. Raises MediaError."""
    import soundfile

    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            return _frames(file.read, file.channels, file.samplerate), file.samplerate
    except (MediaError, MemoryError):
        raise
    except Exception as error:  # libsndfile's, of many kinds
        raise MediaError(f"decode audio: damaged {name}: its contents cannot be decoded") from error


def _frames(read: Callable[..., Floats], channels: int, rate: int) -> Floats:
    """Returns all frames of a file, which `read` returns block by block, each the mean of its channels."""
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
    """Resamples `frames` samples from `rate` to RATE, by a windowed sinc of unit gain, also at the edges. `read`
    returns the samples from a start to a stop: one block at a time."""
    if rate == RATE or frames <= 1:
        starts = range(0, frames, _BLOCK_FRAMES)
        blocks = [read(start, min(start + _BLOCK_FRAMES, frames)) for start in starts]
        return np.concatenate([np.zeros(0, np.float32), *blocks])
    reach = _ZEROS / (_ROLL_OFF * min(1.0, RATE / rate))
    # The output `phases` later has its centre `step` inputs later. Odd rates have many phases.
    step, phases = rate // gcd(rate, RATE), RATE // gcd(rate, RATE)
    count = resampled(frames, rate)
    found = np.empty(count, np.float32)
    all_turns = -(-count // phases)
    turns = min(all_turns, max(1, max(_BLOCK_FRAMES, _PASS_FRAMES * phases) // step))  # of all phases, in a block
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
    """Yields the first input of each of `count` outputs, and the weights of its inputs, at most `taps`."""
    steps, most = np.arange(taps), max(1, _MOST_WEIGHTS // taps)
    for first in range(0, count, most):
        centres = np.arange(first, min(first + most, count)) * rate / RATE
        starts = np.ceil(centres - reach)
        counts = np.floor(centres + reach) + 1 - starts
        weights = _weights(np.abs(starts[:, None] + steps - centres[:, None]) / reach)
        for start, length, row in zip(starts.astype(int).tolist(), counts.astype(int).tolist(), weights, strict=True):
            yield start, row[:length]


def _weights(distances: Doubles) -> Doubles:
    """Returns the kernel at distances from 0 to 1, between the entries of a table."""
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
    """Returns the lengths of the pieces: as few as possible and about equal, cut in the quietest tenth of a second near
    the end of each."""
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
    """Returns the middle of the last of the windows with the least energy."""
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
    """Returns logarithmic spectra [frames, MEL_BINS]. Raises MediaError for fewer than 161 samples, which make none."""
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
    """Returns the triangles of the bins over the frequencies, [257, MEL_BINS]: HTK's scale, without a norm."""

    def mel(hertz: float) -> float:
        return float(2595.0 * np.log10(1.0 + hertz / 700.0))

    edges = 700.0 * (np.power(10, np.linspace(mel(0.0), mel(RATE / 2), MEL_BINS + 2) / 2595.0) - 1.0)
    slopes = edges[None] - np.linspace(0, RATE // 2, _FFT // 2 + 1)[:, None]
    widths = np.diff(edges)
    falling, rising = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    return np.maximum(np.zeros(1), np.minimum(falling, rising))
