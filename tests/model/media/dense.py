"""Prompts with pictures, computed all at once and from first principles: no cache, and nothing of the runner.

Embeddings are put together by hand, positions come from a walk over the tokens, rotations and masks from numpy.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tests.lib.seeing import BOTH_WAYS, MROPE, SECTIONS, Parts, fresh, places_of, tokens_of, walk

Masks = dict[bool, mx.array]
"""bool [L, L], by whether a layer has a window."""


class NumpyRope:
    """Turns each pair of dimensions by the position in its channel."""

    def __init__(self, positions: Sequence[tuple[int, int, int]], dimensions: int, base: float) -> None:
        self._positions = np.array(positions, np.float64).T
        self._dimensions, self._base = dimensions, base

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        assert offset == 0
        found: npt.NDArray[np.float64] = np.array(x, np.float64)
        turned, half = found.copy(), self._dimensions // 2
        for each in range(half):
            angle = self._positions[_channel(each)] * self._base ** (-2 * each / self._dimensions)
            first, second = found[..., each], found[..., half + each]
            turned[..., each] = first * np.cos(angle) - second * np.sin(angle)
            turned[..., half + each] = first * np.sin(angle) + second * np.cos(angle)
        return mx.array(turned.astype(np.float32))


def _channel(frequency: int) -> int:
    """Rows at 1, 4, 7, ..., columns at 2, 5, 8, ..., each as often as its section is long; else the time."""
    if frequency % 3 == 1 and frequency < 3 * SECTIONS[1]:
        return 1
    return 2 if frequency % 3 == 2 and frequency < 3 * SECTIONS[2] else 0


def masks(parts: Parts, window: int, both_ways: bool) -> Masks:
    """Layers with a window see (the past or the same picture) and within the window; the others the past."""
    count = len(tokens_of(parts))
    query, key = np.arange(count)[:, None], np.arange(count)[None]
    picture = np.full(count, -1)
    for number, place in enumerate(places_of(parts)):
        picture[place.start : place.stop] = number
    same = (picture[:, None] == picture[None]) & (picture[:, None] >= 0)
    seen = (key <= query) | same if both_ways else key <= query
    return {False: mx.array(key <= query), True: mx.array(seen & (key > query - window))}


@cache
def _taken_apart(name: str) -> Any:
    return fresh(name)


def _inner(module: Any) -> Any:
    """The part of a model that has the table and the layers."""
    module = getattr(module, "language_model", module)
    return module.backbone if hasattr(module, "backbone") else module.model


def logits(name: str, parts: Parts) -> mx.array:
    """Returns the logits [L, V] of a whole prompt."""
    module = _taken_apart(name)
    inner, ids = _inner(module), tokens_of(parts)
    table = "embeddings" if "embeddings" in inner else "embed_tokens"
    kept = inner[table]
    weight, scale = np.array(kept.weight), float(getattr(inner, "embed_scale", 1.0))
    hidden = weight[ids] * np.float32(scale)
    for place in places_of(parts):
        hidden[place.start : place.stop] = np.array(place.shown.features(weight.shape[1]))
        ids[place.start : place.stop] = [0] * place.shown.tokens
    setattr(inner, table, _Given(kept, mx.array((hidden.astype(np.float64) / scale).astype(np.float32))[None]))
    ropes = [(each, each.rope) for _, each in module.named_modules() if name in MROPE and "rope" in each]
    for each, rope in ropes:
        each.rope = NumpyRope(walk(parts), rope.dims, rope.base)
    method = next((each for each in ("_make_masks", "_masks") if hasattr(inner, each)), None)
    if method is not None:
        made = masks(parts, inner.window_size if method == "_make_masks" else inner.window, name in BOTH_WAYS)
        slides = ["sliding_attention" in (_kind(layer), _kind(layer.self_attn)) for layer in inner.layers]
        setattr(inner, method, lambda hidden, cache: [made[each] for each in slides])
    try:
        found: mx.array = module(mx.array([ids]))[0]
        mx.eval(found)
    finally:
        setattr(inner, table, kept)
        for each, rope in ropes:
            each.rope = rope
    return found


def _kind(layer: Any) -> str:
    return str(getattr(layer, "layer_type", ""))


class _Given:
    """In place of a table: the rows that were put together, whatever is looked up."""

    def __init__(self, table: Any, rows: mx.array) -> None:
        self._table, self._rows = table, rows

    def __call__(self, ids: mx.array) -> mx.array:
        assert ids.shape == self._rows.shape[:2]
        return self._rows

    def as_linear(self, x: mx.array) -> mx.array:
        found: mx.array = self._table.as_linear(x)
        return found
