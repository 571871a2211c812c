"""Which tokens may come next: bits from the host, scores on the device."""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

Mask = bytes
"""A bit for each token, from the lowest of the first byte on; tokens beyond its end may not come."""


def masked(scores: mx.array, masks: Sequence[Mask | None]) -> mx.array:
    """`scores` (float32 [B, V]) with -inf where the row's mask has no bit; without one a row stays as it is (lazy)."""
    vocab_size = scores.shape[-1]
    width = -(-vocab_size // 8)
    rows = [b"\xff" * width if mask is None else mask[:width].ljust(width, b"\0") for mask in masks]
    bits = mx.array(memoryview(b"".join(rows)).cast("B", (len(rows), width)))  # type: ignore[arg-type]  # any buffer
    return scores + _scores_of_bytes()[bits].reshape(len(rows), -1)[:, :vocab_size]


@cache
def _scores_of_bytes() -> mx.array:
    """What each of the eight bits of a byte adds to the score of its token, float32 [256, 8]: a gather expands a mask
    on every device, where shifts and comparisons would be five operations."""
    return mx.array([[0.0 if byte >> bit & 1 else -mx.inf for bit in range(8)] for byte in range(256)])
