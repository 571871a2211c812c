"""Finds out how each layer of an opened model rotates, and which tokens it sees; expects transformers' formulas.

Each layer is recorded in a forward of the whole model, so that it gets the model's own arguments. It is then called
again with another token in one place at a time.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, cast
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

LENGTH = 12
"""Tokens of the forward: more than a window has."""
_POSITION = 7
_DRAWS = 4
"""Attention may ignore one other token, but not four."""
_ROTATION = re.compile("rope|rotary", re.IGNORECASE)
Call = Callable[..., object]


class Layer(NamedTuple):
    """The rotation and the sight of one layer."""

    rotation: NDArray[np.float64] | None
    """The rotated unit vectors [D, D] at position 7; None if nothing is rotated."""
    seen: Callable[[], list[int]]
    """Returns the tokens that change the layer's output for the last one. Can be called once."""


def measured(module: Module, make_layers: Callable[[], list[object]], tokens: list[int]) -> list[Layer]:
    """Returns what each layer of a model does with LENGTH `tokens`."""
    layers = cast("list[Module]", module.layers)
    calls: dict[int, tuple[Call, Module, tuple[object, ...], dict[str, object]]] = {}
    rotations: dict[int, tuple[Module, int]] = {}
    current = -1

    def layer_call(original: Call, self: Module, *arguments: object, **named: object) -> object:
        nonlocal current
        index = next((number for number, layer in enumerate(layers) if layer is self), -1)
        if index >= 0:
            current = index
            calls[index] = (original, self, copy.deepcopy(arguments), copy.deepcopy(named))
        return original(self, *arguments, **named)

    def rotation_call(original: Call, self: Module, x: mx.array, *arguments: object, **named: object) -> object:
        if current >= 0:
            rotations.setdefault(current, (self, x.shape[-1]))
        return original(self, x, *arguments, **named)

    rotary = {type(each) for each in module.modules() if _ROTATION.search(type(each).__name__)}
    rotary = {each for each in rotary if "attention" not in each.__name__.lower()}
    with _watched({type(each) for each in layers}, layer_call), _watched(rotary, rotation_call):
        mx.eval(module(mx.array([tokens]), cache=make_layers()))
    return [
        Layer(_rotation(*rotations[index]) if index in rotations else None, partial(_seen, *calls[index]))
        for index in range(len(layers))
    ]


@contextmanager
def _watched(classes: set[type], call: Call) -> Iterator[None]:
    with ExitStack() as stack:
        for each in classes:
            original = cast("Call", each.__call__)

            def watched(self: object, *arguments: object, original: Call = original, **named: object) -> object:
                return call(original, self, *arguments, **named)

            stack.enter_context(patch.object(each, "__call__", watched))
        yield


def _rotation(module: Module, width: int) -> NDArray[np.float64]:
    units = mx.eye(width).reshape(1, width, 1, width)
    return np.array(module(units, offset=_POSITION)).reshape(width, width).astype(np.float64)


def _seen(call: Call, layer: Module, arguments: tuple[object, ...], named: Mapping[str, object]) -> list[int]:
    """Calls the layer with rows that differ from the last, unchanged one in one token each."""
    first, *others = arguments
    assert isinstance(first, mx.array)
    count = _DRAWS * LENGTH
    noise = 3 * mx.random.normal((count, 1, first.shape[-1]), key=mx.random.key(1))
    places = mx.tile(mx.eye(LENGTH), (_DRAWS, 1))[..., None]
    rows = mx.repeat(first, count + 1, axis=-3) + mx.pad(places * noise, [(0, 1), (0, 0), (0, 0)])
    made = call(layer, rows, *others, **named)
    last = cast("mx.array", made[0] if isinstance(made, tuple) else made)[..., -1, :]
    plain = last[..., -1:, :]
    changes = mx.abs(last[..., :-1, :] - plain).reshape(-1, _DRAWS, LENGTH, first.shape[-1]).max(axis=(0, 1, 3))
    return np.flatnonzero(np.array(changes > 1e-6 * mx.abs(plain).max())).tolist()


def visible(letter: str, window: int) -> list[int]:
    """Returns the tokens that the last one sees in a layer of that letter (`Row.layers`)."""
    start = {"s": LENGTH - window, "c": (LENGTH - 1) // window * window if window else 0}.get(letter, 0)
    return list(range(start, LENGTH))


def rotation(said: Mapping[str, object], width: int) -> NDArray[np.float64]:
    """Returns the rotated unit vectors [D, D] at position 7.

    `theta` and `dims` are the base and the rotated part of a head. `kind` is the type of scaling, with its fields of
    `rope_scaling`. `pairs` is "halves" if the i-th numbers of both halves rotate together, or "neighbours".
    """
    dims = cast("int", said["dims"])
    assert dims <= width, f"{dims} of {width} numbers should rotate"
    speeds, scale = frequencies(said, dims)
    angles, result = speeds * _POSITION, np.eye(width)
    for index, angle in enumerate(angles):
        pairs = said.get("pairs", "halves") == "neighbours"
        one, other = (2 * index, 2 * index + 1) if pairs else (index, index + dims // 2)
        result[one, one] = result[other, other] = math.cos(angle) * scale
        result[one, other], result[other, one] = math.sin(angle) * scale, -math.sin(angle) * scale
    return result


def frequencies(said: Mapping[str, object], dims: int) -> tuple[NDArray[np.float64], float]:
    """Returns radians per token [dims / 2], and the factor on the rotated numbers."""
    kind, number = said.get("kind", "default"), cast("Mapping[str, float]", said)
    steps = np.arange(0, dims, 2, dtype=np.float64)
    plain, scale = number["theta"] ** (-steps / dims), number.get("scale", 1.0)
    if kind == "default":
        return plain, scale
    if kind == "linear":
        return plain / number["factor"], scale
    if kind == "proportional":  # only the first rotate, at the speed they have if all do
        return np.where(steps < dims * number["part"], plain, 0.0), scale
    if kind == "longrope":
        return plain / np.array(said["divisors"]), scale
    factor, original = number["factor"], number["original_max_position_embeddings"]
    if kind == "llama3":
        turns = original * plain / (2 * math.pi)
        low, high = number["low_freq_factor"], number["high_freq_factor"]
        kept = np.clip((turns - low) / max(high - low, 1e-9), 0, 1)
        return plain * kept + plain / factor * (1 - kept), scale
    assert kind == "yarn"

    def place(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(number["theta"]))

    low, high = place(number.get("beta_fast", 32)), place(number.get("beta_slow", 1))
    if said.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    kept = 1 - np.clip((steps / 2 - low) / max(high - low, 1e-3), 0, 1)
    return plain * kept + plain / factor * (1 - kept), number.get("scale", 0.1 * math.log(factor) + 1)
