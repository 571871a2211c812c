"""Filters tokens by probability: top-p, min-p.

Weights are float32 [B, N], for the whole vocabulary or for the candidates of top-k. They are probabilities, scaled in
each row so that the largest is 1. A token that is filtered out has weight 0.
"""

from collections.abc import Sequence

import mlx.core as mx

from runner.sampling import sort_keys

_BELOW_ONE = 1 - 2.0**-24
"""A factor that makes every positive float32 smaller."""

_SORTED_AT_ONCE = {mx.cpu: 4096, mx.gpu: 1 << 62}
"""The longest row that is sorted as a whole. On a CPU, a partition costs much less than a sort; on a GPU it is one."""


class TopP:
    """Removes the tokens outside the nucleus. 0 < p <= 1 for each row; 1 keeps every token.

    A token is kept if all more probable tokens together have a probability of less than p; of equally probable tokens,
    the earlier one counts as more probable. So at least one token is kept.
    """

    def __init__(self, p: Sequence[float], n: int) -> None:
        self._outside = mx.array([[min(1 - share, _BELOW_ONE)] for share in p])
        self._ids = sort_keys.descending_ids(n)

    def __call__(self, weights: mx.array) -> mx.array:
        """Returns `weights` [B, n] with 0 for tokens outside the nucleus."""
        keys = sort_keys.keys(weights, self._ids)
        return weights * (keys >= _first_above(keys, self._outside))


def min_p(weights: mx.array, p: mx.array) -> mx.array:
    """Removes the tokens that are less probable than p times the most probable one.

    0 <= p <= 1, float32 [B, 1]; 0 keeps every token.
    """
    return weights * (weights >= p)


def _first_above(keys: mx.array, share: mx.array) -> mx.array:
    """Returns the first of the ascending `keys` [B, N] where the sum of values exceeds `share` [B, 1] of all: [B, 1].

    Selects by weight: partitions into halves and continues with the half in which the sum is reached, until the rest is
    short enough to sort. Shapes do not depend on the data, so the host need not know which half that is.
    """
    at_once = _SORTED_AT_ONCE[mx.default_device().type]
    halved = keys.shape[-1] > at_once
    if halved:
        below = share * mx.sum(sort_keys.values_of(keys), axis=-1, keepdims=True)
    while (n := keys.shape[-1]) > at_once:
        half = (n + 1) // 2
        # For odd n, the halves share the middle key, which is in its final place after the partition.
        keys = mx.partition(keys, half - 1, axis=-1)
        lower = mx.sum(sort_keys.values_of(keys[..., : n - half]), axis=-1, keepdims=True)
        above = lower > below
        keys = mx.where(above, keys[..., :half], keys[..., n - half :])
        below = mx.where(above, below, below - lower)
    keys = mx.sort(keys, axis=-1)
    sums = mx.cumsum(sort_keys.values_of(keys), axis=-1)
    last = sums[..., -1:]
    # Sums of halves and of the whole are rounded differently, but the last key must always reach the sum.
    below = mx.minimum(below, last * _BELOW_ONE) if halved else last * share
    return mx.take_along_axis(keys, mx.argmax(sums > below, axis=-1, keepdims=True), axis=-1)
