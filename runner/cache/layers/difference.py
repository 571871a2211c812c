"""Measures how far the logits of a trial are from the right ones."""

from typing import cast

import mlx.core as mx


def difference(ours: mx.array, right: mx.array) -> float:
    """Returns the largest error of any position, in relation to the spread of its logits.

    Both are [L, V]. 0 means equal, about 1.4 unrelated logits of the same size, infinite that ours are not numbers.
    """
    known = mx.isfinite(right)  # a model may close some tokens with -inf
    ours, right = (mx.where(known, x.astype(mx.float32), 0) for x in (ours, right))
    spread = mx.linalg.norm(right - mx.mean(right, -1, keepdims=True), axis=-1)
    error = mx.linalg.norm(ours - right, axis=-1) / mx.maximum(spread, 1e-6)
    return cast("float", mx.max(mx.where(mx.isnan(error), mx.inf, error)).item())
