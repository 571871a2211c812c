"""Sounds that tests make on the spot."""

from collections.abc import Sequence

import numpy as np

from scripts.tools.models.wav import EXTENSIBLE, FLOAT, PCM, RATE, Floats, chunk, fmt, noise, pack, tone, wav, wave

__all__ = ["EXTENSIBLE", "FLOAT", "PCM", "Floats", "chunk", "fmt", "noise", "pack", "speech", "tone", "wav", "wave"]


def speech(seconds: float, pauses: Sequence[float] = (), rate: int = RATE) -> Floats:
    """Noise with a fifth of a second of silence around each of `pauses`, in seconds."""
    found = noise(round(seconds * rate)) * np.float32(0.3)
    for pause in pauses:
        found[round((pause - 0.1) * rate) : round((pause + 0.1) * rate)] = 0
    return found
