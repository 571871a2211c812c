"""Top-k: the k highest scores of a vocabulary, in an order for the draw.

Drawing from the same candidates in another order gives another token for the same random number, so the order is part
of what a seed promises. On a GPU it is that of Ollama's own runner: the first k results of `mx.argpartition` on the
negated scores, which is a sort there, so that candidates come by falling score. On a CPU that partition is a selection
by exchanges: one pair of scores anywhere in the vocabulary that rounding has swapped can reorder all candidates. A
prompt from the cache is rounded otherwise than a computed one, so the order of a CPU is that of the ids, which rounding
does not change.
"""

from collections.abc import Callable

import mlx.core as mx

_BLOCK = 32
"""Tokens in a block, of which at first only the best one counts."""


def top_k(k: int, n: int) -> Callable[[mx.array], mx.array]:
    """Returns a function from scores [B, n] to candidate ids, uint32 [B, k], in this device's order. 0 < k < n."""
    return TopKById(k, n) if mx.default_device().type == mx.cpu else TopKBySort(k, n)


class TopKById:
    """Candidates in the order of a CPU: by id."""

    def __init__(self, k: int, _: int) -> None:
        self._k = k

    def __call__(self, scores: mx.array) -> mx.array:
        """Returns the candidate ids, uint32 [B, k], for `scores` [B, n]."""
        return mx.sort(mx.argpartition(-scores, self._k - 1, axis=-1)[..., : self._k], axis=-1)


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
