"""Random numbers for requests, and draws with these. Each number depends only on the request's seed and the draw's
number."""

from collections.abc import Sequence

import mlx.core as mx

_64_BITS = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_BLOCK = 64
"""The random numbers made together: a single number needs as many operations on the device as a block, a dozen."""


def random_keys(seeds: Sequence[int], draws: Sequence[int], count: int) -> mx.array:
    """Returns the keys of `count` draws for each seed, from draw number `draws[row]` (from 0) on: uint32 [B, count, 2].
    The keys are the results of `mx.random.key` for a SplitMix64 sequence (Steele, Lea and Flood)."""
    starts = [seed + (draw + 1) * _GAMMA for seed, draw in zip(seeds, draws, strict=True)]
    z = _uint64(starts)[:, None] + _uint64([_GAMMA * number for number in range(count)])
    factors = _uint64([0xBF58476D1CE4E5B9, 0x94D049BB133111EB])
    z = (z ^ (z >> 30)) * factors[0]
    z = (z ^ (z >> 27)) * factors[1]
    z = z ^ (z >> 31)
    # A key begins with the upper half. MLX only runs on little-endian machines, so the halves are swapped here. A
    # reversed view does not work: MLX's CUDA kernel misreads negative strides of keys.
    z = (z >> 32) | (z << 32)
    return z.view(mx.uint32).reshape(len(seeds), count, 2)


class Uniforms:
    """Sequences of uniform numbers, one sequence for each request. Each number is made with the key of its draw."""

    def __init__(self, seeds: Sequence[int], draws: Sequence[int]) -> None:
        """`draws` are the numbers of draws that the requests have made before."""
        self._seeds = seeds
        self._taken = list(draws)
        self._made: list[mx.array] = []

    def copy(self) -> "Uniforms":
        """Returns another object that gives the same next numbers."""
        copied = Uniforms(self._seeds, self._taken)
        copied._made = [*self._made]
        return copied

    @property
    def draws(self) -> list[int]:
        """The number of draws that each request has made."""
        return [taken - len(self._made) for taken in self._taken]

    def take_next(self) -> mx.array:
        """Returns the next number of each request, float32 [B, 1]: 0 <= number < 1. Lazy."""
        if not self._made:
            self._made = self._next_block()
        return self._made.pop()

    def ahead(self, count: int) -> mx.array:
        """Returns the next `count` numbers of the only request, float32 [count, 1]. `take_next` returns them again.
        Lazy."""
        while len(self._made) < count:
            self._made = self._next_block() + self._made
        return mx.concatenate(self._made[: -count - 1 : -1])

    def _next_block(self) -> list[mx.array]:
        """Makes the next numbers of all requests, in reverse order."""
        keys = random_keys(self._seeds, self._taken, _BLOCK)
        block = _uniform_of_each(keys.reshape(-1, 2)).reshape(-1, _BLOCK)
        self._taken = [taken + _BLOCK for taken in self._taken]
        return block.split(_BLOCK, axis=1)[::-1]

    def skip(self, count: int) -> None:
        """Skips the next `count` numbers of each request."""
        made = min(count, len(self._made))
        del self._made[len(self._made) - made :]
        self._taken = [taken + count - made for taken in self._taken]


def _uint64(values: Sequence[int]) -> mx.array:
    """Returns `values` modulo 2**64; MLX accepts numbers from 2**63 on only as negative numbers."""
    return mx.array([((value + (1 << 63)) & _64_BITS) - (1 << 63) for value in values], dtype=mx.int64).view(mx.uint64)


_uniform_of_each = mx.vmap(lambda key: mx.random.uniform(shape=(1,), key=key))


def draw(weights: mx.array, uniform: mx.array) -> mx.array:
    """Draws an index [B] from each row of `weights` [B, N], with probabilities in proportion to the weights.

    Looks up `uniform` [B, 1] in the cumulative weights. For one row, `mx.random.categorical` does the same with
    log-probabilities, and draws the same token with the same key. It is not used, for three reasons. It would need
    logarithms of the weights, which take longer than everything else. It draws otherwise for two or more rows. And here
    an index of weight 0 is never drawn: a uniform number is at most 1 - 2**-24, so its product with the largest
    cumulative weight is less than this cumulative weight. A GPU sums in blocks and may give adjacent indices of weight
    0 different sums: sums at indices of weight 0 are set to 0.
    """
    cumulative = mx.where(weights > 0, mx.cumsum(weights, axis=-1), 0)
    return mx.argmax(cumulative > uniform * mx.max(cumulative, axis=-1, keepdims=True), axis=-1)
