"""Attention on NVIDIA GPUs, without a plan for each number of keys.

Of several 16-bit queries MLX computes it with cuDNN there, which makes a plan for each shape: 50 to 75 ms on an H200,
where the attention itself takes 0.2. Each round of drafts and each prompt has another number of keys. Plain products
need no plans, and memory for the scores only.
"""

from typing import Any

import mlx.core as mx

_MOST_SCORES = 1 << 25
"""Of all heads; 64 MB. Beyond it cuDNN's plan is a small part of the work."""
_own = mx.fast.scaled_dot_product_attention


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **rest: Any,
) -> mx.array:
    """Returns what mx.fast.scaled_dot_product_attention does, up to rounding."""
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    if queries == 1 or batch * heads * queries * keys > _MOST_SCORES or rest:
        return _own(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)
    scores = (q * scale).reshape(batch, groups, -1, width) @ k.swapaxes(-1, -2)
    scores = scores.reshape(batch, heads, queries, keys)
    if isinstance(mask, str):  # "causal": the last query sees all keys
        mask = mx.arange(keys) <= mx.arange(keys - queries, keys)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        sinks = mx.broadcast_to(sinks[:, None, None], (batch, heads, queries, 1))
        scores = mx.concatenate([sinks, scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    return (weights.reshape(batch, groups, -1, keys) @ v).reshape(batch, heads, queries, -1)


def use_on_cuda() -> None:
    """Puts `attention` before MLX's own, for all models of this process."""
    mx.fast.scaled_dot_product_attention = attention
