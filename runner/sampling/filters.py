"""Chooses which tokens may be drawn: the mask of a grammar, top-k, top-p, min-p.

Weights are float32 [B, N], for the whole vocabulary or for the candidates of top-k. They are probabilities, scaled in
each row so that the largest is 1. Filters give the tokens that they remove the weight 0.
"""

from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx

Mask = bytes
"""The tokens that a grammar allows: one bit per token, from the lowest bit of the first byte on. A mask allows no token
beyond its end."""
_BLOCK = 32
"""Tokens in a block. Top-k first compares the best token of each block."""
_BELOW_ONE = 1 - 2.0**-24
"""A factor that makes every positive float32 smaller."""
_SORTED_AT_ONCE = {mx.cpu: 4096, mx.gpu: 1 << 62}
"""The longest row that is sorted as a whole. On a CPU, a partition costs much less than a sort; on a GPU it is one."""


def masked(scores: mx.array, masks: Sequence[Mask | None]) -> mx.array:
    """Sets `scores` (float32 [B, V]) to -inf where the row's mask has no bit; None leaves a row unchanged. Lazy."""
    vocab_size = scores.shape[-1]
    width = -(-vocab_size // 8)
    rows = [b"\xff" * width if mask is None else mask[:width].ljust(width, b"\0") for mask in masks]
    bits = mx.array(memoryview(b"".join(rows)).cast("B", (len(rows), width)))  # type: ignore[arg-type]  # any buffer
    return scores + _scores_of_bytes()[bits].reshape(len(rows), -1)[:, :vocab_size]


@cache
def _scores_of_bytes() -> mx.array:
    """Returns the score that each bit of a byte adds to its token, float32 [256, 8].

    A gather expands a mask in one operation on every device; shifts and comparisons would take five.
    """
    return mx.array([[0.0 if byte >> bit & 1 else -mx.inf for bit in range(8)] for byte in range(256)])


def sort_keys(values: mx.array, ids: mx.array) -> mx.array:
    """Returns keys [B, N] that rank tokens without ties, ascending with `values` (float32 [B, N], none negative).

    A key is a uint64 with the value in the upper half and, of `ids` (uint64 [N]), the token's id or its distance from
    the last id in the lower half. So `ids` order equal values, which rounded models often produce; a threshold selects
    an exact number of tokens; and sorting keys sorts values and ids at once.
    """
    # Read as integers, the bits of non-negative floats have the order of the floats.
    return (values.view(mx.uint32).astype(mx.uint64) << 32) | ids


def values_of(keys: mx.array) -> mx.array:
    """Returns the values [B, N] in `keys` [B, N]."""
    return keys.view(mx.float32)[..., 1::2]  # the upper halves: MLX only runs on little-endian machines


def top_k(k: int, n: int) -> Callable[[mx.array], mx.array]:
    """Returns a function from scores [B, n] to the ids of the k highest, uint32 [B, k], in an order for the draw.
    0 < k < n.

    Another order of the same candidates gives another token for the same random number, so a seed promises the order
    too. A GPU has the order of Ollama's own runner: the first k results of `mx.argpartition` on the negated scores,
    which sorts there. On a CPU that partition selects by exchanges: rounding that swaps one pair of scores, anywhere in
    the vocabulary, can reorder all candidates. A prompt from the cache is rounded otherwise than a computed one, so a
    CPU orders by id, which rounding does not change.
    """
    return top_k_by_id(k, n) if mx.default_device().type == mx.cpu else TopKBySort(k, n)


def top_k_by_id(k: int, _: int) -> Callable[[mx.array], mx.array]:
    """Returns the function of a CPU: candidates by id."""
    return lambda scores: mx.sort(mx.argpartition(-scores, k - 1, axis=-1)[..., :k], axis=-1)


class TopKBySort:
    """Candidates in the order of a GPU: by falling score; of equal scores the lower id comes first.

    Sorting a whole vocabulary takes far longer than reading each score once. So a large vocabulary is divided into
    blocks of consecutive tokens, and only the k blocks with the highest maxima are sorted: a token of any other block
    ranks below these k maxima. Blocks and tokens are compared in the order of their ids, and sorts are stable.
    """

    def __init__(self, k: int, n: int) -> None:
        self._k = k
        self._blocks = n // _BLOCK if 4 * k * _BLOCK <= n else 0
        """Block b has the ids from b * _BLOCK on. Without blocks, the whole vocabulary is sorted."""
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


class TopP:
    """Removes the tokens outside the nucleus. 0 < p <= 1 for each row; 1 keeps every token.

    A token stays if all more probable tokens together have a probability of less than p; of equally probable tokens,
    the earlier one counts as more probable. So at least one token stays.
    """

    def __init__(self, p: Sequence[float], n: int) -> None:
        self._outside = mx.array([[min(1 - share, _BELOW_ONE)] for share in p])
        self._ids = mx.arange(n - 1, -1, -1, dtype=mx.uint64)  # of equal values, the lowest id comes last

    def __call__(self, weights: mx.array) -> mx.array:
        """Returns `weights` [B, n] with 0 for tokens outside the nucleus."""
        keys = sort_keys(weights, self._ids)
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
        below = share * mx.sum(values_of(keys), axis=-1, keepdims=True)
    while (n := keys.shape[-1]) > at_once:
        half = (n + 1) // 2
        # For odd n, the halves share the middle key, which is in its final place after the partition.
        keys = mx.partition(keys, half - 1, axis=-1)
        lower = mx.sum(values_of(keys[..., : n - half]), axis=-1, keepdims=True)
        above = lower > below
        keys = mx.where(above, keys[..., :half], keys[..., n - half :])
        below = mx.where(above, below, below - lower)
    keys = mx.sort(keys, axis=-1)
    sums = mx.cumsum(values_of(keys), axis=-1)
    last = sums[..., -1:]
    # Sums of halves and of the whole are rounded differently, but the last key must always reach the sum.
    below = mx.minimum(below, last * _BELOW_ONE) if halved else last * share
    return mx.take_along_axis(keys, mx.argmax(sums > below, axis=-1, keepdims=True), axis=-1)
