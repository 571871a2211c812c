"""Judges trials of a model: the error of its logits, and the exception that it has raised."""

from typing import cast

import mlx.core as mx


def difference(ours: mx.array, right: mx.array) -> float:
    """Returns the largest error of any position, in relation to the spread of its logits.

    Both are [L, V]. 0 means equal; 1.4, unrelated logits of the same size; infinity, that some are no numbers.
    """
    closed = right == -mx.inf  # a model may close some tokens
    ours, right = (mx.where(closed, 0, x.astype(mx.float32)) for x in (ours, right))
    spread = mx.linalg.norm(right - mx.mean(right, -1, keepdims=True), axis=-1)
    error = mx.linalg.norm(ours - right, axis=-1) / mx.maximum(spread, 1e-6)
    return cast("float", mx.max(mx.where(mx.isnan(error), mx.inf, error)).item())


def first_line(error: Exception) -> str:
    """Returns the first line of an error, for the log."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
