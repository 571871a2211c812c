"""Packed tensors through mlx-lm's `sanitize`, whose methods know plain weights.

They rename, drop, stack and split, which does the same to words, scales and biases: so each role goes through on its
own, under the plain names (store.md, section 0, step 7). What a method does to the packed axis itself (it transposes
it, multiplies it) has no such form: these tensors are unpacked first. Which ones is found by trial, on placeholders.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.errors import ModelError
from runner.model.experts import View, Weights
from runner.model.quantization import Packing, packings

Sanitize = Callable[[Weights, View], tuple[Module, Weights]]
"""A fresh module, and what its `sanitize` makes of weights in the form of the view."""

_NUMBER = re.compile(r"\d+")


class Arrays(NamedTuple):
    """The arrays of one logical tensor; the fields of `checkpoint.Tensor`, in its order."""

    weight: mx.array
    scale: mx.array | None = None
    bias: mx.array | None = None
    global_scale: mx.array | None = None

    @property
    def factors(self) -> mx.array:
        """The global scale for each row [..., out, 1], float32: one for all, for each expert or for each row."""
        assert self.global_scale is not None
        rows, factors = self.weight.shape[:-1], self.global_scale.astype(mx.float32)
        if factors.size == 1:
            factors = factors.reshape(())
        elif factors.shape == rows:
            factors = factors[..., None]
        else:
            factors = factors.reshape(rows[0], *[1] * len(rows))
        return mx.broadcast_to(factors, (*rows, 1))

    def unpacked(self, packing: Packing) -> mx.array:
        """The values [..., out, in]: in the type of affine scales, else bfloat16, which holds them exactly."""
        assert self.scale is not None
        values = mx.dequantize(self.weight, self.scale, self.bias, packing.group_size, packing.bits, mode=packing.mode)
        return values if self.global_scale is None else (values.astype(mx.float32) * self.factors).astype(values.dtype)


class Recipe(NamedTuple):
    """What has to be done to the tensors of one model before its `sanitize`."""

    view: View
    unpacked: Mapping[str, Packing] = {}


def through(sanitize: Sanitize, arrays: Mapping[str, Arrays], recipe: Recipe) -> tuple[Module, Weights]:
    """Module and weights by mlx-lm's names, packed ones as `.weight`, `.scales`, `.biases`, perhaps `.global_scale`.

    A result is packed if words and scales came out in different shapes; no legal packing has them equal. The global
    scale is [..., out], one number a row.
    """
    arrays = {
        name: Arrays(item.unpacked(recipe.unpacked[name])) if name in recipe.unpacked else item
        for name, item in arrays.items()
    }
    module, weights = sanitize(_words(arrays), recipe.view)
    if all(item.scale is None for item in arrays.values()):
        return module, weights
    _, scales = sanitize(_scales(arrays), recipe.view)
    _, biases = sanitize({name: _first(item.bias, item.weight) for name, item in arrays.items()}, recipe.view)
    _check_names(weights, scales, biases)
    factors: Weights = {}
    if any(item.global_scale is not None for item in arrays.values()):
        marked = {
            name: item.factors if item.global_scale is not None else _first(item.scale, item.weight)
            for name, item in arrays.items()
        }
        _, factors = sanitize(marked, recipe.view)
    for name, words in list(weights.items()):
        if scales[name].shape == words.shape:
            continue
        stem = name.removesuffix(".weight")
        weights[f"{stem}.scales"] = scales[name]
        if biases[name].shape == scales[name].shape:
            weights[f"{stem}.biases"] = biases[name]
        if name in factors and factors[name].dtype != scales[name].dtype:
            weights[f"{stem}.global_scale"] = factors[name].squeeze(-1)
    return module, weights


def find_recipe(
    sanitize: Sanitize, arrays: Mapping[str, Arrays], views: list[View], wanted: Callable[[Module], Weights]
) -> Recipe:
    """The recipe by which `arrays` (placeholders) become the parameters that `wanted` reads from a module.

    Of several views the one that gives the right names wins, else the one that comes nearest, whose faults the caller
    will tell. Raises what `sanitize` raises if no view gets through it.
    """
    view, module, weights = _choose(sanitize, _words(arrays), views, wanted)
    packed = {name for name, item in arrays.items() if item.scale is not None}
    if not packed:
        return Recipe(view)
    _, scales = sanitize(_scales(arrays), view)
    _check_names(weights, scales)
    parameters = wanted(module)
    unpacked: dict[str, Packing] = {}
    spoiled = set(_spoiled(weights, scales))
    for names in _alike(packed) if spoiled else ():
        # With the scales of these alone in the shape of their words, what comes of them looks plain.
        _, trial = sanitize(
            _scales({name: _plain(arrays[name]) if name in names else arrays[name] for name in arrays}), view
        )
        touched = {name for name in weights if trial[name].shape != scales[name].shape}
        if touched & spoiled:
            unpacked |= _packings(sanitize, arrays, names, view, parameters)
    return Recipe(view, unpacked)


def _choose(
    sanitize: Sanitize, words: Weights, views: list[View], wanted: Callable[[Module], Weights]
) -> tuple[View, Module, Weights]:
    best: tuple[int, View, Module, Weights] | None = None
    fault: ModelError | None = None
    for view in views:
        try:
            module, weights = sanitize(words, view)
        except ModelError as error:
            fault = fault or error
            continue
        wrong = len(wanted(module).keys() ^ weights.keys())
        if best is None or wrong < best[0]:
            best = (wrong, view, module, weights)
        if not wrong:
            break
    if best is None:
        assert fault
        raise fault
    return best[1:]


def _check_names(*roles: Weights) -> None:
    different = set[str]().union(*roles).difference(set[str](roles[0]).intersection(*roles))
    if different:
        raise ModelError(f"packed tensors cannot be taken: {min(different)} comes of a part of them only")


def _spoiled(weights: Weights, scales: Weights) -> Iterator[str]:
    """The packed results that are more than renamed, stacked or split along another axis than the packed one."""
    for name, words in weights.items():
        found = scales[name]
        if words.shape != found.shape and (words.dtype != mx.uint32 or words.shape[:-1] != found.shape[:-1]):
            yield name


def _alike(names: set[str]) -> list[set[str]]:
    """Groups of names that differ in numbers only: the same tensor of every layer and expert."""
    groups: dict[str, set[str]] = {}
    for name in sorted(names):
        groups.setdefault(_NUMBER.sub("*", name), set()).add(name)
    return list(groups.values())


def _packings(
    sanitize: Sanitize, arrays: Mapping[str, Arrays], names: set[str], view: View, parameters: Weights
) -> dict[str, Packing]:
    """The packing of each of `names`: of those that its shapes allow, the one whose values fit the module best."""
    shapes: dict[tuple[object, ...], list[str]] = {}
    for name in sorted(names):
        item = arrays[name]
        assert item.scale is not None
        shapes.setdefault((item.weight.shape[-1], item.scale.shape[-1], item.scale.dtype), []).append(name)
    found: dict[str, Packing] = {}
    for members in shapes.values():
        words, scale = arrays[members[0]].weight, arrays[members[0]].scale
        assert scale is not None
        candidates = packings(words.shape[-1], scale.shape[-1], byte_scales=scale.dtype == mx.uint8)
        best = min(candidates, key=lambda packing: _misfits(sanitize, arrays, members, packing, view, parameters))
        found |= dict.fromkeys(members, best)
    return found


def _misfits(
    sanitize: Sanitize,
    arrays: Mapping[str, Arrays],
    names: list[str],
    packing: Packing,
    view: View,
    parameters: Weights,
) -> int:
    """How many parameters have another shape than wanted with `names` unpacked so."""
    trial = {name: Arrays(arrays[name].unpacked(packing)) if name in names else item for name, item in arrays.items()}
    try:
        _, weights = sanitize(_words(trial), view)
    except ModelError:
        return len(parameters) + 1
    return sum(name not in weights or weights[name].shape != array.shape for name, array in parameters.items())


def _words(arrays: Mapping[str, Arrays]) -> Weights:
    return {name: item.weight for name, item in arrays.items()}


def _scales(arrays: Mapping[str, Arrays]) -> Weights:
    return {name: _first(item.scale, item.weight) for name, item in arrays.items()}


def _plain(item: Arrays) -> Arrays:
    return Arrays(item.weight)


def _first(array: mx.array | None, default: mx.array) -> mx.array:
    return default if array is None else array
