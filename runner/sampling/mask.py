"""Applies token masks: bits on the host, scores on the device."""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

Mask = bytes
"""One bit per token, from the lowest bit of the first byte on; tokens beyond its end are not allowed."""


def masked(scores: mx.array, masks: Sequence[Mask | None]) -> mx.array:
    """Sets `scores` (float32 [B, V]) to -inf where the row's mask has no bit; None leaves a row unchanged. Lazy."""
    vocab_size = scores.shape[-1]
    width = -(-vocab_size // 8)
    rows = [b"\xff" * width if mask is None else mask[:width].ljust(width, b"\0") for mask in masks]
    bits = mx.array(memoryview(b"".join(rows)).cast("B", (len(rows), width)))  # type: ignore[arg-type]  # any buffer
    return scores + _scores_of_bytes()[bits].reshape(len(rows), -1)[:, :vocab_size]


@cache
def _scores_of_bytes() -> mx.array:
    """Returns the score that each bit of a byte adds to its token, float32 [256, 8].

    A gather expands a mask in one operation on every device; shifts and comparisons would take five.
    """
    return mx.array([[0.0 if byte >> bit & 1 else -mx.inf for bit in range(8)] for byte in range(256)])
