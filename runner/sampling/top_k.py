"""Top-k: the k highest of a vocabulary's scores, in the order in which Ollama's own runner draws from them.

That is the order in which `mx.argpartition` of the negated scores leaves its first k, equal scores by id: a draw from
the same ones in another order gives another token for the same random number. A GPU's partition is a sort, so there
they come by falling score. A CPU's is a selection that exchanges scores over and over; where it leaves the highest
depends on all the others, so nothing less than that partition gives its order.
"""

from collections.abc import Callable

import mlx.core as mx

_TEAM = 32
"""Tokens in a team of which only the best one is looked at first."""


def top_k(k: int, n: int) -> Callable[[mx.array], mx.array]:
    """Takes scores [B, n] to the ids, uint32 [B, k], of the candidates, in the order of this device. 0 < k < n."""
    return TopKByPartition(k, n) if mx.default_device().type == mx.cpu else TopKBySort(k, n)


class TopKByPartition:
    """The order of a CPU."""

    def __init__(self, k: int, _: int) -> None:
        self._k = k

    def __call__(self, scores: mx.array) -> mx.array:
        """The ids, uint32 [B, k], of the candidates of `scores` [B, n]."""
        return mx.argpartition(-scores, self._k - 1, axis=-1)[..., : self._k]


class TopKBySort:
    """The order of a GPU: by falling score.

    Sorting a whole vocabulary takes far longer than one look at each score. So the tokens of a large one form teams of
    neighbours, and only the k teams whose best members are the best of all are sorted: whoever is in another team is
    beaten by the best of each of these. Teams and members are compared in the order of their ids, and sorts are stable,
    so an equal score with a higher id is no better.
    """

    def __init__(self, k: int, n: int) -> None:
        self._k = k
        self._teams = n // _TEAM if 4 * k * _TEAM <= n else 0
        """How many; 0: the whole vocabulary is sorted. Team t has the ids from t * _TEAM on."""
        self._members = mx.arange(_TEAM, dtype=mx.uint32)
        self._others = mx.arange(self._teams * _TEAM, n, dtype=mx.uint32)[None]  # fewer than a team: always sorted

    def __call__(self, scores: mx.array) -> mx.array:
        """The ids, uint32 [B, k], of the candidates of `scores` [B, n]."""
        if not self._teams:
            return self._highest(scores)
        rows = scores.shape[0]
        best = mx.max(scores[:, : self._teams * _TEAM].reshape(rows, self._teams, _TEAM), axis=-1)
        chosen = mx.sort(self._highest(best), axis=-1)
        ids = (chosen[:, :, None] * _TEAM + self._members).reshape(rows, -1)
        if self._others.size:
            ids = mx.concatenate([ids, mx.broadcast_to(self._others, (rows, self._others.size))], axis=1)
        found = self._highest(mx.take_along_axis(scores, ids, axis=-1))
        return mx.take_along_axis(ids, found, axis=-1)

    def _highest(self, scores: mx.array) -> mx.array:
        return mx.argsort(-scores, axis=-1)[..., : self._k]
