"""Estimates of what encoding takes, measured with MLX's CPU backend; a GPU's kernels keep no attention scores."""

import mlx.core as mx

_COPIES = 13
"""Arrays [patches, row] at a time: the input, its norm, queries, keys and values in pieces and joined, the result."""
_SCORES = 3
"""Arrays of scores for one block of queries at a time."""
_INNER = 5
"""Arrays of one piece inside the feed-forward network at a time."""


def work_bytes(dtype: mx.Dtype) -> int:
    """Returns the bytes of a number of that type while it is computed with; MLX's CPU backend widens 16-bit ones."""
    return 4 if mx.default_device() == mx.Device(mx.cpu) else dtype.size


def transformer_bytes(count: int, row_bytes: int, inner_bytes: int, heads: int, piece_bytes: int) -> int:
    """Returns the most bytes that the blocks of an encoder take for `count` patches.

    `row_bytes` are those of one patch's queries, `inner_bytes` those of its row inside the feed-forward network.
    """
    scores = min(max(piece_bytes, heads * count * 4), heads * count * count * 4)
    inner = min(max(piece_bytes, inner_bytes), count * inner_bytes)
    return _COPIES * count * row_bytes + max(_SCORES * scores, _INNER * inner)


def embedding_bytes(count: int, values: int, row_bytes: int) -> int:
    """Returns the most bytes that embedding `count` patches of `values` pixels takes: float32 copies, then rows."""
    return count * (values * (1 + 5 * 4) + 6 * row_bytes)
