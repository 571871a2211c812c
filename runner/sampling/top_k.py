"""Top-k: the k highest scores of a vocabulary, in the order in which Ollama's own runner draws from them.

That is the order of the first k results of `mx.argpartition` on the negated scores, equal scores by id. The order
matters: drawing from the same candidates in another order gives another token for the same random number. On a GPU a
partition is a sort, so candidates come by falling score. On a CPU it is a selection by repeated exchanges, whose order
depends on all other scores, so only that same partition reproduces it.
"""

from collections.abc import Callable

import mlx.core as mx

_BLOCK = 32
"""Tokens in a block, of which at first only the best one counts."""


def top_k(k: int, n: int) -> Callable[[mx.array], mx.array]:
    """Returns a function from scores [B, n] to candidate ids, uint32 [B, k], in this device's order. 0 < k < n."""
    return TopKByPartition(k, n) if mx.default_device().type == mx.cpu else TopKBySort(k, n)


class TopKByPartition:
    """Candidates in the order of a CPU's partition."""

    def __init__(self, k: int, _: int) -> None:
        self._k = k

    def __call__(self, scores: mx.array) -> mx.array:
        """Returns the candidate ids, uint32 [B, k], for `scores` [B, n]."""
        return mx.argpartition(-scores, self._k - 1, axis=-1)[..., : self._k]


class TopKBySort:
    """Candidates in the order of a GPU: by falling score.

    Sorting a whole vocabulary takes far longer than reading each score once. So a large vocabulary is divided into
    blocks of consecutive tokens, and only the k blocks with the highest maxima are sorted: a token of any other block
    ranks below these k maxima. Blocks and tokens are compared in the order of their ids, and sorts are stable, so of
    equal scores the lower id comes first.
    """

    def __init__(self, k: int, n: int) -> None:
        self._k = k
        self._blocks = n // _BLOCK if 4 * k * _BLOCK <= n else 0
        """The number of blocks; 0 if the whole vocabulary is sorted. Block b has the ids from b * _BLOCK on."""
        self._offsets = mx.arange(_BLOCK, dtype=mx.uint32)
        self._rest = mx.arange(self._blocks * _BLOCK, n, dtype=mx.uint32)[None]  # less than a block: always sorted

    def __call__(self, scores: mx.array) -> mx.array:
        """Returns the candidate ids, uint32 [B, k], for `scores` [B, n]."""
        if not self._blocks:
            return self._highest(scores)
        rows = scores.shape[0]
        best = mx.max(scores[:, : self._blocks * _BLOCK].reshape(rows, self._blocks, _BLOCK), axis=-1)
        chosen = mx.sort(self._highest(best), axis=-1)
        ids = (chosen[:, :, None] * _BLOCK + self._offsets).reshape(rows, -1)
        if self._rest.size:
            ids = mx.concatenate([ids, mx.broadcast_to(self._rest, (rows, self._rest.size))], axis=1)
        found = self._highest(mx.take_along_axis(scores, ids, axis=-1))
        return mx.take_along_axis(ids, found, axis=-1)

    def _highest(self, scores: mx.array) -> mx.array:
        return mx.argsort(-scores, axis=-1)[..., : self._k]
