"""How far the logits of a trial lie from what they should be."""

from typing import cast

import mlx.core as mx


def difference(ours: mx.array, right: mx.array) -> float:
    """The largest error of a position, as a part of the spread of its logits.

    Of [L, V] both: 0 where they are equal, about 1.4 for others of the same size, infinite where ours are no numbers.
    """
    known = mx.isfinite(right)  # a model may close some tokens with -inf
    ours, right = (mx.where(known, x.astype(mx.float32), 0) for x in (ours, right))
    spread = mx.linalg.norm(right - mx.mean(right, -1, keepdims=True), axis=-1)
    error = mx.linalg.norm(ours - right, axis=-1) / mx.maximum(spread, 1e-6)
    return cast("float", mx.max(mx.where(mx.isnan(error), mx.inf, error)).item())
