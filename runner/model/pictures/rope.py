"""Rotary positions of prompts with pictures: three channels inside, shifted behind (Qwen's interleaved form).

Frequency j turns by the position in the row for j = 1, 4, 7, ..., in the column for j = 2, 5, 8, ..., each as often as
its section is long, and by the time for all others.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE


class Angles(NamedTuple):
    """Cosines and sines [L, dimensions / 2] in float32."""

    cosines: mx.array
    sines: mx.array


def angles(positions: Sequence[Sequence[int]], dimensions: int, base: float, sections: Sequence[int]) -> Angles:
    """Returns the angles of L tokens at these positions [3][L]. `dimensions` are those that turn."""
    half = dimensions // 2
    channels = [
        next((channel for channel in (1, 2) if each % 3 == channel and each < 3 * sections[channel]), 0)
        for each in range(half)
    ]
    frequencies = mx.power(base, -mx.arange(half, dtype=mx.float32) / half)
    turned = mx.array([*map(list, positions)], dtype=mx.float32)[mx.array(channels)].T * frequencies
    return Angles(mx.cos(turned), mx.sin(turned))


class AngledRope(Module):
    """Stands in for the rope of one attention during a forward: turns all heads by the same angles."""

    def __init__(self, found: Angles) -> None:
        Module.__init__(self)
        self._angles = found

    def __call__(self, x: mx.array, offset: object = 0) -> mx.array:  # noqa: ARG002 - the angles say where
        """Turns x [1, heads, L, width]."""
        cosines, sines = self._angles
        half = cosines.shape[-1]
        first, second = x[..., :half].astype(mx.float32), x[..., half : 2 * half].astype(mx.float32)
        turned = [first * cosines - second * sines, first * sines + second * cosines]
        return mx.concatenate([*(part.astype(x.dtype) for part in turned), x[..., 2 * half :]], axis=-1)


class ShiftedRope(Module):
    """Stands in for the rope of one attention during a forward behind pictures: shifts the offsets."""

    def __init__(self, rope: Module, shift: int | mx.array) -> None:
        """`shift` is added to the offsets: one number, or one for each row [B]."""
        Module.__init__(self)
        self._rope, self._shift = (rope,), shift  # in a tuple: it is no part of this module

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Turns x [B, heads, L, width]."""
        return cast("mx.array", self._rope[0](x, offset=offset + self._shift))


def is_plain(rope: object) -> bool:
    """Returns True for a rope of which `angles` gives the positions."""
    return type(rope) is RoPE and not rope.traditional and rope.scale == 1.0
