"""Functions to judge a trial of a model, by the error of its logits or by the exception that it raised."""

from typing import cast

import mlx.core as mx


def difference(ours: mx.array, right: mx.array) -> float:
    """Returns the largest error at a position: the norm of the difference, divided by the spread of the right logits.
    Both are [L, V]. 0 means equal; 1.4, unrelated logits of the same spread; infinity, that some are NaN."""
    closed = right == -mx.inf  # some models never choose certain tokens
    ours, right = (mx.where(closed, 0, x.astype(mx.float32)) for x in (ours, right))
    spread = mx.linalg.norm(right - mx.mean(right, -1, keepdims=True), axis=-1)
    error = mx.linalg.norm(ours - right, axis=-1) / mx.maximum(spread, 1e-6)
    return cast("float", mx.max(mx.where(mx.isnan(error), mx.inf, error)).item())


def first_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its message, for the log."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
