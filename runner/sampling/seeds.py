"""The random numbers of a request: each follows from the request's seed and the number of the draw alone."""

import mlx.core as mx

_64_BITS = (1 << 64) - 1
_BLOCK = 64
"""Draws made at a time: one at a time a number costs a dozen operations on the device, in a block next to nothing."""


def splitmix64(seed: int, draw: int) -> int:
    """The 64-bit value of draw number `draw` (from 0) of a sequence: Steele, Lea and Flood's SplitMix64."""
    z = (seed + (draw + 1) * 0x9E3779B97F4A7C15) & _64_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return z ^ (z >> 31)


def random_keys(seed: int, first: int, count: int) -> mx.array:
    """What `mx.random.key` makes of the values of draws `first` and following: uint32 [count, 2]."""
    values = [splitmix64(seed, draw) for draw in range(first, first + count)]
    return mx.array([[value >> 32, value & 0xFFFFFFFF] for value in values], dtype=mx.uint32)


class Uniforms:
    """The uniform numbers of one request, in order, each made with the key of its draw. Owned by its sampler."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._draws = 0
        self._made: list[mx.array] = []

    def take(self) -> mx.array:
        """The next number, float32 [1, 1]: 0 <= number < 1. Not evaluated."""
        if not self._made:
            block = _uniform_of_each(random_keys(self._seed, self._draws, _BLOCK))
            self._draws += _BLOCK
            self._made = block.split(_BLOCK)[::-1]
        return self._made.pop()


def _uniform(key: mx.array) -> mx.array:
    return mx.random.uniform(shape=(1,), key=key)


_uniform_of_each = mx.vmap(_uniform)
