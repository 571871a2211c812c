"""Passes packed tensors through mlx-lm's `sanitize` methods, which expect plain weights.

Renaming, dropping, stacking and splitting have the same effect on words, scales and biases. So words, scales and biases
pass through `sanitize` separately, each under the plain names (docs/internals/store.md, 0, step 7). Operations on the
packed axis, such as transposing or multiplying, do not work on packed words. Tensors with such operations are unpacked
first. Trials on placeholders find these tensors.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.errors import ModelError
from runner.model.packing import Packing, possible_packings
from runner.model.weights.experts import ExpertLayout, Weights
from runner.model.weights.parameters import parameters_of

Sanitize = Callable[[Weights, ExpertLayout], tuple[Module, Weights]]
"""A function that returns a fresh module, and the result of the module's `sanitize` for weights in the given layout."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Arrays(NamedTuple):
    """The arrays of one logical tensor: the fields of `checkpoint.LogicalTensor` after `name`, in the same order."""

    weight: mx.array
    scale: mx.array | None = None
    bias: mx.array | None = None
    global_scale: mx.array | None = None

    @property
    def factors(self) -> mx.array:
        """The global scale of each row, float32 [..., out, 1]. A file has one for all rows, for each expert or each
        row."""
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
        """Returns the plain values [..., out, in]: in the type of affine scales, else in bfloat16, which is exact."""
        assert self.scale is not None
        values = mx.dequantize(self.weight, self.scale, self.bias, packing.group_size, packing.bits, mode=packing.mode)
        return values if self.global_scale is None else (values.astype(mx.float32) * self.factors).astype(values.dtype)


class Recipe(NamedTuple):
    """The preparation of one model's tensors for `sanitize`: the layout of experts, and tensors to unpack."""

    layout: ExpertLayout
    unpacked: Mapping[str, Packing] = {}


def sanitize_packed(sanitize: Sanitize, arrays: Mapping[str, Arrays], recipe: Recipe) -> tuple[Module, Weights]:
    """Returns the module and its weights. A packed weight is `.weight`, `.scales`, `.biases` and perhaps
    `.global_scale`, which is [..., out], one number per row. A result of `sanitize` is packed if its words and its
    scales have different shapes; no packing has equal shapes."""
    arrays = _with_unpacked(arrays, recipe.unpacked)
    module, weights = sanitize(_words(arrays), recipe.layout)
    if all(item.scale is None for item in arrays.values()):
        return module, weights
    _, scales = sanitize(_scales(arrays), recipe.layout)
    _, biases = sanitize({name: _first(item.bias, item.weight) for name, item in arrays.items()}, recipe.layout)
    _check_names(weights, scales, biases)
    factors: Weights = {}
    if any(item.global_scale is not None for item in arrays.values()):
        marked = {
            name: item.factors if item.global_scale is not None else _first(item.scale, item.weight)
            for name, item in arrays.items()
        }
        _, factors = sanitize(marked, recipe.layout)
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
    sanitize: Sanitize, arrays: Mapping[str, Arrays], layouts: list[ExpertLayout], computed: Callable[[str], bool]
) -> Recipe:
    """Returns the recipe by which `arrays`, which are placeholders, become the parameters of the module.

    Takes the first layout that gives the right names and shapes. If none does, takes the layout with the fewest faults,
    which the caller reports. `computed` returns True for a tensor that must be unpacked although no trial shows it.
    Raises the error of `sanitize` if it fails for every layout.
    """
    packed = {name for name, item in arrays.items() if item.scale is not None}
    unpacked: dict[str, Packing] = {}
    forced = {name for name in packed if computed(name)}
    if forced:
        unpacked = _find_packings(sanitize, arrays, forced, layouts)
        arrays = _with_unpacked(arrays, unpacked)
    layout, _, weights = _choose(sanitize, _words(arrays), layouts)
    packed -= forced
    if not packed:
        return Recipe(layout, unpacked)
    _, scales = sanitize(_scales(arrays), layout)
    _check_names(weights, scales)
    # Packed results in which the packed axis was changed, instead of only renamed, stacked or split.
    spoiled = {
        name
        for name, words in weights.items()
        if words.shape != (found := scales[name].shape) and (words.dtype != mx.uint32 or words.shape[:-1] != found[:-1])
    }
    changed = {name for name in packed if _form(arrays[name].weight) != _form(weights.get(name))}
    for names in _alike(changed) if spoiled else ():
        # In this trial, `names` have words in place of scales: results made from these tensors change their shapes.
        plain = {name: Arrays(item.weight) if name in names else item for name, item in arrays.items()}
        _, trial = sanitize(_scales(plain), layout)
        touched = {name for name in weights if trial[name].shape != scales[name].shape}
        if touched & spoiled:
            unpacked |= _find_packings(sanitize, arrays, names, [layout])
    return Recipe(layout, unpacked)


def _choose(sanitize: Sanitize, words: Weights, layouts: list[ExpertLayout]) -> tuple[ExpertLayout, int, Weights]:
    """Returns the layout whose weights fit best, the number of names and shapes that do not fit, and the weights."""
    best: tuple[ExpertLayout, int, Weights] | None = None
    fault: ModelError | None = None
    for layout in layouts:
        try:
            module, weights = sanitize(words, layout)
        except ModelError as error:
            fault = fault or error
            continue
        misfits = _misfits(parameters_of(module), weights)
        if best is None or misfits < best[1]:
            best = (layout, misfits, weights)
        if not misfits:
            break
    if best is None:
        assert fault
        raise fault
    return best


def _misfits(parameters: Weights, weights: Weights) -> int:
    """Returns the number of names and shapes that differ. Ignores the last axis of packed words."""
    shapes = {name: array.shape for name, array in weights.items()}
    count = len(parameters.keys() ^ shapes.keys())
    for name in parameters.keys() & shapes.keys():
        want, have = parameters[name].shape, shapes[name]
        packed = weights[name].dtype == mx.uint32 and parameters[name].dtype != mx.uint32
        count += want[:-1] != have[:-1] if packed else want != have
    return count


def _check_names(*roles: Weights) -> None:
    different = set[str]().union(*roles).difference(set[str](roles[0]).intersection(*roles))
    if different:
        raise ModelError(
            f"packed tensors cannot be loaded: sanitize makes {min(different)} from some of their parts only"
        )


def _alike(names: set[str]) -> list[set[str]]:
    """Groups names that differ only in numbers: the same tensor of every layer and expert."""
    groups: dict[str, set[str]] = {}
    for name in sorted(names):
        groups.setdefault(_NUMBER.sub("*", name), set()).add(name)
    return list(groups.values())


def _find_packings(
    sanitize: Sanitize, arrays: Mapping[str, Arrays], names: set[str], layouts: list[ExpertLayout]
) -> dict[str, Packing]:
    """Returns the packing of each tensor in `names`: it fits the tensor's shapes, and fits the module best."""
    forms: dict[tuple[int, int, bool], list[str]] = {}
    for name in sorted(names):
        words, scale = arrays[name].weight, arrays[name].scale
        assert scale is not None
        forms.setdefault((words.shape[-1], scale.shape[-1], scale.dtype == mx.uint8), []).append(name)
    found: dict[str, Packing] = {}
    fewest: int | None = None
    for choice in itertools.product(*(possible_packings(*form[:2], byte_scales=form[2]) for form in forms)):
        trial = {name: one for one, members in zip(choice, forms.values(), strict=True) for name in members}
        try:
            _, misfits, _ = _choose(sanitize, _words(_with_unpacked(arrays, trial)), layouts)
        except ModelError:
            continue
        if fewest is None or misfits < fewest:
            found, fewest = trial, misfits
    return found


def _with_unpacked(arrays: Mapping[str, Arrays], packings: Mapping[str, Packing]) -> dict[str, Arrays]:
    return {name: Arrays(item.unpacked(packings[name])) if name in packings else item for name, item in arrays.items()}


def _words(arrays: Mapping[str, Arrays]) -> Weights:
    return {name: item.weight for name, item in arrays.items()}


def _scales(arrays: Mapping[str, Arrays]) -> Weights:
    return {name: _first(item.scale, item.weight) for name, item in arrays.items()}


def _form(array: mx.array | None) -> object:
    return array is not None and (array.shape, array.dtype)


def _first(array: mx.array | None, default: mx.array) -> mx.array:
    return default if array is None else array
