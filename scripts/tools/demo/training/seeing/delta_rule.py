"""The gated delta rule over a whole prompt in blocks of tokens, for training.

mlx-lm computes it one token after the other where there is no GPU, which takes most of a training step. Inside a block
of C tokens all is products of matrices: what the tokens write, U [C, width], solves (I + A) U = W, where A holds what
each token reads of the earlier ones. A is strictly lower triangular, so (I + A)^-1 is a product of few factors.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
from mlx.nn.layers.activations import softplus
from mlx_lm.models import qwen3_5

_NAME = "gated_delta_update"
_BLOCK = 32
"""Tokens; a power of two."""


@contextmanager
def in_blocks() -> Iterator[None]:
    """Lets mlx-lm's Qwen 3.5 compute in blocks inside, over whole prompts."""
    own = getattr(qwen3_5, _NAME)
    setattr(qwen3_5, _NAME, gated_delta)
    try:
        yield
    finally:
        setattr(qwen3_5, _NAME, own)


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = False,
) -> tuple[mx.array, mx.array]:
    """Returns the outputs [B, L, heads, width] and the last state, as mlx-lm's function does without state and mask."""
    del use_kernel
    assert state is None
    assert mask is None
    length, repeats = q.shape[1], v.shape[2] // q.shape[2]
    decay = -mx.exp(a_log) * softplus(a + dt_bias)  # logarithms, zero or below
    queries, keys = (_blocks(mx.repeat(each, repeats, axis=2)) for each in (q, k))
    values, rate, decay = _blocks(v), _blocks(mx.sigmoid(b)[..., None]), _blocks(decay[..., None])

    since = mx.cumsum(decay, axis=-2)  # [B, heads, blocks, C, 1]
    lower = mx.tril(mx.ones((_BLOCK, _BLOCK)))
    kept = mx.exp((since - since.swapaxes(-1, -2)) * lower) * lower
    read = rate * kept * (keys @ keys.swapaxes(-1, -2)) * mx.tril(lower, -1)
    solve = _inverse(read)
    wanted, recalled = solve @ (rate * values), solve @ (rate * mx.exp(since) * keys)
    seen, asked = kept * (queries @ keys.swapaxes(-1, -2)), mx.exp(since) * queries
    left = mx.exp(since[..., -1:, :] - since) * keys

    outputs = []
    current = mx.zeros((*keys.shape[:2], keys.shape[-1], values.shape[-1]))
    for block in range(keys.shape[2]):
        written = wanted[:, :, block] - recalled[:, :, block] @ current
        outputs.append(asked[:, :, block] @ current + seen[:, :, block] @ written)
        gone = mx.exp(since[:, :, block, -1:])
        current = gone * current + left[:, :, block].swapaxes(-1, -2) @ written
    joined = mx.concatenate(outputs, axis=2)[:, :, :length]
    return joined.swapaxes(1, 2).astype(q.dtype), current.swapaxes(-1, -2)


def _blocks(x: mx.array) -> mx.array:
    """Returns x [B, L, heads, width] as [B, heads, blocks, C, width], with zeros behind its end."""
    more = -x.shape[1] % _BLOCK
    padded = mx.pad(x, [(0, 0), (0, more), (0, 0), (0, 0)]).swapaxes(1, 2)
    return padded.reshape(*padded.shape[:2], -1, _BLOCK, x.shape[-1])


def _inverse(read: mx.array) -> mx.array:
    """Returns (I + A)^-1 of strictly lower triangular matrices [..., C, C]."""
    identity = mx.eye(_BLOCK)
    result, power, degree = identity - read, read @ read, 2
    while degree < _BLOCK:
        result = result @ (identity + power)
        power, degree = power @ power, degree * 2
    return result
