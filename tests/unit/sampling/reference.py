"""A second implementation of docs/internals/wire.md, 4, in plain Python and numpy: slow and direct."""

from collections.abc import Sequence
from fractions import Fraction

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]


def splitmix64(seed: int, draw: int) -> int:
    """Returns the 64-bit value of draw number `draw` (from 0) of SplitMix64 (Steele, Lea and Flood)."""
    bits = (1 << 64) - 1
    z = (seed + (draw + 1) * 0x9E3779B97F4A7C15) & bits
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & bits
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & bits
    return z ^ (z >> 31)


def only(array: mx.array) -> int:
    """Returns the one id in `array`."""
    (value,) = np.array(array).reshape(-1).astype(np.int64).tolist()
    return int(value)


def penalised(
    scores: Row, history: Sequence[int], repeat: float, presence: float, frequency: float, last_n: int
) -> Row:
    """Applies the penalties for the last `last_n` tokens of `history`; `repeat` and `last_n` are normalised."""
    result = scores.copy()
    window = list(history)[-last_n:] if last_n > 0 else []
    for token in set(window):
        score = result[token]
        score = score * np.float32(repeat) if score < 0 else score / np.float32(repeat)
        score = score - np.float32(presence)
        result[token] = score - np.float32(window.count(token)) * np.float32(frequency)
    return result


def probabilities(scores: Row, temperature: float) -> NDArray[np.float64]:
    """Returns the softmax of score/temperature in double precision."""
    scaled = scores.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    result: NDArray[np.float64] = weights / weights.sum()
    return result


def nucleus(weights: Sequence[Fraction], p: Fraction) -> set[int]:
    """Returns exactly the ids that top-p keeps; equal weights in the order of their ids."""
    order = sorted(range(len(weights)), key=lambda index: (-weights[index], index))
    kept, before = set(), Fraction(0)
    for index in order:
        if before >= p * sum(weights):
            break
        kept.add(index)
        before += weights[index]
    return kept
