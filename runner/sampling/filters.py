"""Removes tokens before the draw: the mask of a grammar, top-k, top-p, min-p.

Weights are float32 [B, N], for the whole vocabulary or for the candidates of top-k. They are probabilities, scaled in
each row so that the largest is 1. Filters set the weights of the tokens that they remove to 0.
"""

from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx

Mask = bytes
"""The tokens that a grammar allows, one bit per token; the lowest bit of the first byte is for token 0. A mask forbids
tokens beyond its end."""
_BLOCK = 32
"""The number of tokens in a block. Top-k first compares the highest scores of the blocks."""
_BELOW_ONE = 1 - 2.0**-24
"""A factor that makes every positive float32 smaller."""
_SORTED_AT_ONCE = {mx.cpu: 4096, mx.gpu: 1 << 62}
"""The longest row that is sorted as a whole. On a CPU, a partition is much faster than a sort; a GPU sorts."""


def masked(scores: mx.array, masks: Sequence[Mask | None]) -> mx.array:
    """Returns `scores` (float32 [B, V]) with -inf for the tokens that the mask of the row forbids (lazy). A mask of
    None forbids no token."""
    vocab_size = scores.shape[-1]
    width = -(-vocab_size // 8)
    rows = [b"\xff" * width if mask is None else mask[:width].ljust(width, b"\0") for mask in masks]
    bits = mx.array(memoryview(b"".join(rows)).cast("B", (len(rows), width)))  # type: ignore[arg-type]  # any buffer
    return scores + _scores_of_bytes()[bits].reshape(len(rows), -1)[:, :vocab_size]


@cache
def _scores_of_bytes() -> mx.array:
    """Returns, for each byte of a mask, the numbers that its bits add to the scores of their tokens, float32 [256, 8].
    With this table, a gather expands a mask in one operation; shifts and comparisons would need five."""
    return mx.array([[0.0 if byte >> bit & 1 else -mx.inf for bit in range(8)] for byte in range(256)])


def sort_keys(values: mx.array, ids: mx.array) -> mx.array:
    """Returns keys [B, N] that rank tokens without ties, ascending with `values` (float32 [B, N], none negative).

    A key is a uint64: the upper half is the value, the lower half the token's number in `ids` (uint64 [N]), its id or
    its distance from the last id. So `ids` orders equal values, which rounded models often produce; a threshold selects
    an exact number of tokens; and sorting keys sorts values and ids together.
    """
    # Read as integers, the bits of non-negative floats have the order of the floats.
    return (values.view(mx.uint32).astype(mx.uint64) << 32) | ids


def values_of(keys: mx.array) -> mx.array:
    """Returns the values in the upper halves of `keys` [B, N], in the same shape."""
    return keys.view(mx.float32)[..., 1::2]  # MLX only runs on little-endian machines


def top_k(k: int, n: int) -> Callable[[mx.array], mx.array]:
    """Returns a function from scores [B, n] to the ids of the k highest, uint32 [B, k], in an order for the draw.
    0 < k < n.

    The order decides which token a random number draws, so it must be the same whenever a seed is used again. On a GPU
    it is the order of Ollama's own runner: the first k results of `mx.argpartition` on the negated scores, which sorts
    there. On a CPU `mx.argpartition` exchanges elements: if rounding swaps two scores anywhere in the vocabulary, all
    candidates can change places. A prompt from the cache is rounded otherwise than a computed prompt. So a CPU orders
    candidates by id, which rounding does not change.
    """
    return top_k_by_id(k, n) if mx.default_device().type == mx.cpu else TopKBySort(k, n)


def top_k_by_id(k: int, _: int) -> Callable[[mx.array], mx.array]:
    """Returns the function for a CPU, which orders candidates by id."""
    return lambda scores: mx.sort(mx.argpartition(-scores, k - 1, axis=-1)[..., :k], axis=-1)


class TopKBySort:
    """The function for a GPU, which orders candidates by falling score; of equal scores the lower id comes first.

    Sorting a whole vocabulary takes far longer than reading it. So a large vocabulary is divided into blocks of
    consecutive tokens, and only the k blocks with the highest maxima are sorted: a token of any other block ranks below
    these k maxima. Blocks and tokens are compared in the order of their ids, and sorts are stable.
    """

    def __init__(self, k: int, n: int) -> None:
        self._k = k
        self._blocks = n // _BLOCK if 4 * k * _BLOCK <= n else 0
        """The number of blocks; block b has the ids from b * _BLOCK on. If it is 0, the whole vocabulary is sorted."""
        self._offsets = mx.arange(_BLOCK, dtype=mx.uint32)
        self._rest = mx.arange(self._blocks * _BLOCK, n, dtype=mx.uint32)[None]  # after the last block: always sorted

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
    """Removes the tokens outside the nucleus. Each row has its own p, 0 < p <= 1; 1 keeps every token.

    A token stays if all more probable tokens together have a probability of less than p; of equally probable tokens,
    the earlier one counts as more probable. So at least one token stays.
    """

    def __init__(self, p: Sequence[float], n: int) -> None:
        self._outside = mx.array([[min(1 - share, _BELOW_ONE)] for share in p])
        self._ids = mx.arange(n - 1, -1, -1, dtype=mx.uint64)  # so the lowest of equally probable ids is last

    def __call__(self, weights: mx.array) -> mx.array:
        """Returns `weights` [B, n] with 0 for tokens outside the nucleus."""
        keys = sort_keys(weights, self._ids)
        return weights * (keys >= _first_above(keys, self._outside))


def min_p(weights: mx.array, p: mx.array) -> mx.array:
    """Returns `weights` [B, n] with 0 for tokens less probable than p times the most probable token. `p` is float32 [B,
    1], 0 <= p <= 1; 0 keeps every token."""
    return weights * (weights >= p)


def _first_above(keys: mx.array, share: mx.array) -> mx.array:
    """Adds up the values of `keys` [B, N] in ascending order. Returns each row's first key, [B, 1], at which the sum
    exceeds `share` [B, 1] times the row's whole sum.

    Partitions the keys into halves and continues with the half in which the sum is reached, until the rest is short
    enough to sort. Shapes do not depend on the data, so the host need not know the chosen half.
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
    # Sums of halves and of the whole are rounded differently. The last key must always exceed the part.
    below = mx.minimum(below, last * _BELOW_ONE) if halved else last * share
    return mx.take_along_axis(keys, mx.argmax(sums > below, axis=-1, keepdims=True), axis=-1)
