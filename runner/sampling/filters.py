"""Which tokens may be drawn: top-k, top-p, min-p.

Scores and weights are float32 [B, N] in the order of the vocabulary. A weight is a probability times a constant of its
row, such that the largest is 1; a token that is filtered out has weight 0.
"""

from collections.abc import Sequence

import mlx.core as mx

from runner.sampling import ranking

_BELOW_ONE = 1 - 2.0**-24
"""Times this, every float32 above 0 becomes less."""

_TEAM = 32
"""Tokens in a team of which only the best one is looked at first."""

_SORTED_AT_ONCE = {mx.cpu: 4096, mx.gpu: 1 << 62}
"""Up to how many tokens a row is sorted whole. A CPU's partition costs a small part of a sort; a GPU's is a sort."""


class TopK:
    """Finds the k highest of n scores. 0 < k < n; ties at the border fall as the device likes.

    A partition of the whole vocabulary takes far longer than one look at each score. So the tokens of a large one form
    teams, and the k teams whose best members are the best of all are ranked by themselves: whoever is in another team
    is beaten by the best of each of these.
    """

    def __init__(self, k: int, n: int) -> None:
        self._k = k
        self._teams = n // _TEAM if 4 * k * _TEAM <= n else 0
        """How many; 0: the whole vocabulary is ranked. Team t has the ids t, t + teams, t + 2 * teams and so on."""
        teamed = self._teams * _TEAM
        self._members = mx.arange(0, teamed, max(1, self._teams), dtype=mx.uint32)[:, None]
        self._others = mx.arange(teamed, n, dtype=mx.uint32)[None]

    def __call__(self, scores: mx.array) -> mx.array:
        """The ids, uint32 [B, k], of the k highest of `scores` [B, n], ascending."""
        if not self._teams:
            return mx.sort(self._highest(scores), axis=-1)
        rows = scores.shape[0]
        teamed = scores[:, : self._teams * _TEAM].reshape(rows, _TEAM, self._teams)
        best = self._highest(mx.max(teamed, axis=1))
        ids = (best[:, None, :] + self._members).reshape(rows, -1)
        if self._others.size:
            ids = mx.concatenate([ids, mx.broadcast_to(self._others, (rows, self._others.size))], axis=1)
        found = self._highest(mx.take_along_axis(scores, ids, axis=-1))
        return mx.sort(mx.take_along_axis(ids, found, axis=-1), axis=-1)

    def _highest(self, scores: mx.array) -> mx.array:
        n = scores.shape[-1]
        return mx.argpartition(scores, n - self._k, axis=-1)[..., n - self._k :]


class TopP:
    """Drops the tokens outside the nucleus. 0 < p <= 1 for each row; 1 keeps every token.

    A token stays if the tokens more probable than it have a probability of less than p together; among equally
    probable ones the lower id counts as more probable. So at least one stays.
    """

    def __init__(self, p: Sequence[float], n: int) -> None:
        self._outside = mx.array([[min(1 - share, _BELOW_ONE)] for share in p])
        self._ids = ranking.descending_ids(n)

    def __call__(self, weights: mx.array) -> mx.array:
        """`weights` [B, n] of the tokens in the nucleus, 0 for the others."""
        keys = ranking.keys(weights, self._ids)
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
        below = share * mx.sum(ranking.values_of(keys), axis=-1, keepdims=True)
    while (n := keys.shape[-1]) > at_once:
        half = (n + 1) // 2
        # With n odd the halves share the key in the middle, which partition has put in its place.
        keys = mx.partition(keys, half - 1, axis=-1)
        lower = mx.sum(ranking.values_of(keys[..., : n - half]), axis=-1, keepdims=True)
        above = lower > below
        keys = mx.where(above, keys[..., :half], keys[..., n - half :])
        below = mx.where(above, below, below - lower)
    keys = mx.sort(keys, axis=-1)
    sums = mx.cumsum(ranking.values_of(keys), axis=-1)
    last = sums[..., -1:]
    # The sums of the halves and of the whole round differently, but the last key gets there in any case.
    below = mx.minimum(below, last * _BELOW_ONE) if halved else last * share
    return mx.take_along_axis(keys, mx.argmax(sums > below, axis=-1, keepdims=True), axis=-1)
