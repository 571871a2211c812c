"""Assembles an mlx-lm module from arrays: its `sanitize`, its quantized layers, and a check of every parameter.

Nothing here evaluates an array. So the same functions run first on placeholders of the right shapes, before a byte of
weights is read, and then on the real arrays (docs/internals/store.md, 0, steps 6 to 10).
"""

import copy
import importlib
import re
from collections.abc import Callable, Mapping
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from runner.errors import ModelError
from runner.model.families import COMPUTED_TENSORS
from runner.model.model_args import Defaults, class_defaults, fill_model_args
from runner.model.opened import OpenedModel
from runner.model.sources.checkpoint import Tensor
from runner.model.sources.header import HeaderEntry
from runner.model.weights import awq
from runner.model.weights.experts import ExpertLayout, Weights, possible_layouts, with_layout
from runner.model.weights.packed import Arrays, Recipe, find_recipe, sanitize_packed
from runner.model.weights.parameters import check_parameters
from runner.model.weights.quantized_layers import MLX_UNIT, check_kernels, quantize_layers

MLX_DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32,
    "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
    "C64": mx.complex64, "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip
"""Type in a file -> its type in MLX."""


def arrays_of(opened: OpenedModel, make: Callable[[HeaderEntry], mx.array]) -> dict[str, Arrays]:
    """Returns the arrays of every needed tensor, each part made by `make`."""

    def arrays(tensor: Tensor) -> Arrays:
        _, weight, *companions = tensor
        return Arrays(make(weight), *(make(part) if part is not None else None for part in companions))

    return {name: arrays(tensor) for name, tensor in opened.tensors.items()}


def placeholders(opened: OpenedModel) -> dict[str, Arrays]:
    """Returns arrays of the right shapes and types, without data."""
    return arrays_of(opened, lambda entry: mx.zeros(entry.shape, MLX_DTYPES[entry.dtype]))


def rehearse(opened: OpenedModel) -> tuple[Module, Recipe]:
    """Builds the module on placeholders. Returns it with the recipe for its weights; ModelError if anything misfits."""
    check_kernels(opened)
    arrays = placeholders(opened)
    recipe = Recipe("as stored")
    if has_source_names(opened):
        possible = possible_layouts(opened.family.module, {name: item.weight for name, item in arrays.items()})
        recipe = find_recipe(
            lambda weights, layout: _sanitized(opened, weights, layout),
            arrays,
            possible if opened.checkpoint.from_store else possible[::-1],
            lambda module: dict(_flat(module.parameters())),
            lambda name: _is_computed(opened, name),
        )
    return assemble(opened, arrays, recipe), recipe


def assemble(opened: OpenedModel, arrays: Mapping[str, Arrays], recipe: Recipe) -> Module:
    """Builds the module of `opened` with `arrays`, which stay lazy. Raises ModelError if anything does not fit."""
    if has_source_names(opened):
        module, weights = sanitize_packed(lambda weights, layout: _sanitized(opened, weights, layout), arrays, recipe)
    else:
        module, weights = _from_packed_directory(opened, arrays)
    quantize_layers(opened, module, weights)
    module.eval()  # some layers create their parameters only in this mode
    check_parameters(opened, dict(_flat(module.parameters())), weights)
    module.load_weights(list(weights.items()), strict=False)
    return module


def _is_computed(opened: OpenedModel, name: str) -> bool:
    pattern, field = COMPUTED_TENSORS.get(opened.family.module, ("", ""))
    return re.fullmatch(pattern, name) is not None and (not field or opened.module_config.get(field) is True)


def has_source_names(opened: OpenedModel) -> bool:
    """Returns True if tensors have the names of their source; in a packed directory they have mlx-lm's own names."""
    packed = any(tensor.scale is not None or name.endswith(".qweight") for name, tensor in opened.tensors.items())
    return opened.checkpoint.from_store or not packed


def _flat(tree: object) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(tree))


def build_module(opened: OpenedModel) -> tuple[Module, Defaults]:
    """Returns a fresh module with lazy random parameters, and the defaults of its classes that it uses.

    Every use needs a fresh one, since some `sanitize` methods change it. Raises ModelError if mlx-lm cannot build it.
    """
    name = f"mlx_lm.models.{opened.family.module}"
    try:
        classes = importlib.import_module(name)
        args_class, module_class = classes.ModelArgs, classes.Model
    except (ImportError, AttributeError, SystemExit) as error:  # one of the modules exits where its package is missing
        raise ModelError(f"unsupported architecture: {opened.architecture} ({name}: {error})") from error
    config = copy.deepcopy(opened.module_config)
    with fill_model_args() as defaults:
        try:
            module: Module = module_class(args_class.from_dict(config))
        except ModelError:
            raise
        except Exception as error:
            missing = ", ".join(field for field, value in defaults.items() if value is None)
            why = f"{type(error).__name__}: {error}{f' (it lacks {missing})' if missing else ''}"
            raise ModelError(f"config.json does not fit {name}: {why}") from error
    return module, class_defaults(args_class, config) | defaults


def _sanitized(opened: OpenedModel, weights: Weights, layout: ExpertLayout) -> tuple[Module, Weights]:
    """Returns a fresh module and the result of its `sanitize` for `weights` in `layout`."""
    module, _ = build_module(opened)
    try:
        with with_layout(weights, layout, opened.family.renamed) as named:
            sanitize = getattr(module, "sanitize", None)
            return module, _with_factors(named if sanitize is None else dict(sanitize(named)))
    except ModelError:
        raise
    except KeyError as error:
        raise ModelError(f"{opened.name} lacks a tensor: {error.args[0] if error.args else error}") from error
    except Exception as error:
        raise ModelError(
            f"mlx_lm.models.{opened.family.module} cannot take the tensors of {opened.name}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _with_factors(weights: Weights) -> Weights:
    """Replaces MLX's global scales, one per tensor or expert, by factors for each row."""
    for name in [name for name in weights if name.endswith(".global_scale")]:
        words = weights.get(f"{name.removesuffix('.global_scale')}.weight")
        if words is not None and words.dtype == mx.uint32:
            weights[name] = Arrays(words, global_scale=weights[name] / MLX_UNIT).factors.squeeze(-1)
    return weights


def _from_packed_directory(opened: OpenedModel, arrays: Mapping[str, Arrays]) -> tuple[Module, Weights]:
    weights = {key: array for name, item in arrays.items() for key, array in _mlx_names(name, item)}
    return _sanitized(opened, awq.to_mlx(weights) if awq.is_awq(weights) else weights, "as stored")


def _mlx_names(name: str, item: Arrays) -> list[tuple[str, mx.array]]:
    stem = name.removesuffix(".weight")
    named = [(name, item.weight), (f"{stem}.scales", item.scale), (f"{stem}.biases", item.bias)]
    return [(key, array) for key, array in named if array is not None]
