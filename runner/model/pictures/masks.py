"""Attention masks in which the tokens of one picture see each other (Gemma 4, in sliding layers)."""

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx

from runner.model.pictures.embedding import Rows

MakeMask = Callable[..., object]


def with_blocks(make_mask: MakeMask, blocks: Sequence[Rows]) -> MakeMask:
    """Returns a `make_mask` of a layer cache that adds blocks of tokens that see each other to its mask.

    A forward holds these blocks as a whole. A token sees no key that has left its window, block or not: the window
    bounds the past only.
    """

    def make(count: int, *, window_size: int | None = None, return_array: bool = False) -> object:
        if count == 1:  # there is nobody else to see
            return make_mask(count, window_size=window_size, return_array=return_array)
        causal = cast("mx.array", make_mask(count, window_size=window_size, return_array=True))
        before = causal.shape[-1] - count  # keys from earlier forwards
        queries = mx.arange(count)[:, None]
        keys = mx.arange(-before, count)[None]
        near = keys > queries - window_size if window_size else mx.array(True)
        for start, stop, _ in blocks:
            inside = (queries >= start) & (queries < stop) & (keys >= start) & (keys < stop)
            causal = causal | (inside & near)
        return causal

    return make
