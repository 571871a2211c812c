"""Sounds as WAV files, from numpy alone: noise, tones, and files that are no sound."""

import struct

import numpy as np
import numpy.typing as npt

RATE = 16_000
Floats = npt.NDArray[np.float32]
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE


def noise(count: int, seed: int = 1) -> Floats:
    """Numbers between -1 and 1 of which any other order, shift or sign would be noticed: whole numbers only, so that
    each machine makes the same."""
    at = np.arange(count, dtype=np.int64) + 977 * seed
    return ((at * at * 7919 + at * 104729) % 2001 / 1000 - 1).astype(np.float32)


def tone(hertz: float, seconds: float, rate: int = RATE) -> Floats:
    """A sine of half the loudness."""
    at = np.arange(round(seconds * rate))
    return (0.5 * np.sin(2 * np.pi * hertz * at / rate)).astype(np.float32)


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    """A chunk of a WAV; `size` is what it claims."""
    return name + struct.pack("<I", len(content) if size is None else size) + content + b"\0" * (len(content) % 2)


def fmt(form: int = PCM, channels: int = 1, rate: int = RATE, bits: int = 16, inner: int | None = None) -> bytes:
    """The chunk that says what the samples are; `inner` is the format behind EXTENSIBLE."""
    width = channels * bits // 8
    content = struct.pack("<HHIIHH", form, channels, rate, rate * width % (1 << 32), width % (1 << 16), bits)
    if inner is not None:
        content += struct.pack("<HHIH", 22, bits, 0, inner) + bytes(14)
    return chunk(b"fmt ", content)


def wave(*chunks: bytes) -> bytes:
    """A WAV of chunks."""
    content = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(content) % (1 << 32)) + content


def pack(samples: npt.NDArray[np.floating], form: int = PCM, bits: int = 16) -> bytes:
    """Samples [frames] or [frames, channels], between -1 and 1, as a WAV stores them."""
    if form == FLOAT:
        return samples.astype("<f4").tobytes()
    whole = np.clip(np.round(samples * float(1 << (bits - 1))), -(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    if bits == 8:
        return (whole + 128).astype(np.uint8).tobytes()
    if bits == 24:
        return whole.astype("<i4").reshape(-1, 1).view(np.uint8)[:, :3].tobytes()
    return whole.astype(f"<i{bits // 8}").tobytes()


def wav(samples: npt.NDArray[np.floating], rate: int = RATE, bits: int = 16, *, form: int = PCM) -> bytes:
    """A WAV of samples [frames] or [frames, channels], between -1 and 1."""
    channels = samples.shape[1] if samples.ndim > 1 else 1
    return wave(fmt(form, channels, rate, bits), chunk(b"data", pack(samples, form, bits)))
