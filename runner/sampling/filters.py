"""Which tokens may be drawn: top-p, min-p.

Weights are float32 [B, N], of the whole vocabulary or of what top-k has left of it. A weight is a probability times a
constant of its row, such that the largest is 1; a token that is filtered out has weight 0.
"""

from collections.abc import Sequence

import mlx.core as mx

from runner.sampling import sort_keys

_BELOW_ONE = 1 - 2.0**-24
"""Times this, every float32 above 0 becomes less."""

_SORTED_AT_ONCE = {mx.cpu: 4096, mx.gpu: 1 << 62}
"""Up to how many tokens a row is sorted whole. A CPU's partition costs a small part of a sort; a GPU's is a sort."""


class TopP:
    """Drops the tokens outside the nucleus. 0 < p <= 1 for each row; 1 keeps every token.

    A token stays if the tokens more probable than it have a probability of less than p together; among equally
    probable ones the earlier one counts as more probable. So at least one stays.
    """

    def __init__(self, p: Sequence[float], n: int) -> None:
        self._outside = mx.array([[min(1 - share, _BELOW_ONE)] for share in p])
        self._ids = sort_keys.descending_ids(n)

    def __call__(self, weights: mx.array) -> mx.array:
        """`weights` [B, n] of the tokens in the nucleus, 0 for the others."""
        keys = sort_keys.keys(weights, self._ids)
        return weights * (keys >= _first_above(keys, self._outside))


def min_p(weights: mx.array, p: mx.array) -> mx.array:
    """`weights` without the tokens that are less probable than p times the most probable one.

    0 <= p <= 1, float32 [B, 1]; 0 keeps every token.
    """
    return weights * (weights >= p)


def _first_above(keys: mx.array, share: mx.array) -> mx.array:
    """Of `keys` [B, N], read upwards, the first one whose value brings the sum above `share` [B, 1] of all: [B, 1].

    A selection by weight: halve by partition and go on with the half in which the sum gets there, until what is left
    is quickly sorted. The shapes do not depend on the data, so the host need not know which half it was.
    """
    at_once = _SORTED_AT_ONCE[mx.default_device().type]
    halved = keys.shape[-1] > at_once
    if halved:
        below = share * mx.sum(sort_keys.values_of(keys), axis=-1, keepdims=True)
    while (n := keys.shape[-1]) > at_once:
        half = (n + 1) // 2
        # With n odd the halves share the key in the middle, which partition has put in its place.
        keys = mx.partition(keys, half - 1, axis=-1)
        lower = mx.sum(sort_keys.values_of(keys[..., : n - half]), axis=-1, keepdims=True)
        above = lower > below
        keys = mx.where(above, keys[..., :half], keys[..., n - half :])
        below = mx.where(above, below, below - lower)
    keys = mx.sort(keys, axis=-1)
    sums = mx.cumsum(sort_keys.values_of(keys), axis=-1)
    last = sums[..., -1:]
    # The sums of the halves and of the whole round differently, but the last key gets there in any case.
    below = mx.minimum(below, last * _BELOW_ONE) if halved else last * share
    return mx.take_along_axis(keys, mx.argmax(sums > below, axis=-1, keepdims=True), axis=-1)
