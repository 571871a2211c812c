"""Assembles an mlx-lm module from arrays, without evaluating them (docs/internals/store.md, 0, steps 6 to 10)."""

import copy
import importlib
import re
from collections.abc import Callable, Mapping

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.errors import ModelError
from runner.model.architectures import COMPUTED_TENSORS
from runner.model.forwards import replace_forwards
from runner.model.module_config import EMBEDDINGS, HEAD, is_tied, is_untied
from runner.model.opened import OpenedModel
from runner.model.sources.checkpoint import LogicalTensor
from runner.model.sources.safetensors import HeaderEntry
from runner.model.weights.experts import ExpertLayout, Weights, possible_layouts, with_layout
from runner.model.weights.mended import mend
from runner.model.weights.model_args import Defaults, class_defaults, fill_model_args
from runner.model.weights.other_packings import fp8_block, from_awq, from_fp8
from runner.model.weights.packed import Arrays, Recipe, find_recipe, sanitize_packed
from runner.model.weights.parameters import check_parameters, parameters_of
from runner.model.weights.quantized_layers import MLX_UNIT, check_kernels, quantize_layers

MLX_DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32,
    "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
    "C64": mx.complex64, "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip
"""Type in a file -> its type in MLX."""


def map_arrays(opened: OpenedModel, make: Callable[[HeaderEntry], mx.array]) -> dict[str, Arrays]:
    """Returns tensor name -> arrays, for every tensor of `opened`. `make` makes the array of a header entry."""

    def arrays(tensor: LogicalTensor) -> Arrays:
        _, weight, *companions = tensor
        return Arrays(make(weight), *(make(part) if part is not None else None for part in companions))

    return {name: arrays(tensor) for name, tensor in opened.tensors.items()}


def placeholders(opened: OpenedModel) -> dict[str, Arrays]:
    """Returns arrays without data, in the shapes and types of the tensors of `opened`."""
    return map_arrays(opened, lambda entry: mx.zeros(entry.shape, MLX_DTYPES[entry.dtype]))


def rehearse(opened: OpenedModel) -> tuple[Module, Recipe]:
    """Returns a module of placeholders, and the recipe for its weights. Raises ModelError if anything does not fit."""
    check_kernels(opened)
    arrays = placeholders(opened)
    recipe = Recipe("as stored")
    if has_source_names(opened):
        pattern, field = COMPUTED_TENSORS.get(opened.family.module, ("", ""))
        computes = not field or opened.module_config.get(field) is True
        possible = possible_layouts(opened.family.module, {name: item.weight for name, item in arrays.items()})
        recipe = find_recipe(
            lambda weights, layout: _sanitized(opened, weights, layout),
            arrays,
            possible if opened.checkpoint.from_store else possible[::-1],
            lambda name: computes and re.fullmatch(pattern, name) is not None,
        )
    return assemble_module(opened, arrays, recipe), recipe


def assemble_module(opened: OpenedModel, arrays: Mapping[str, Arrays], recipe: Recipe) -> Module:
    """Builds the module of `opened` with `arrays`, which stay lazy. Raises ModelError if anything does not fit."""
    if has_source_names(opened):
        module, weights = sanitize_packed(lambda weights, layout: _sanitized(opened, weights, layout), arrays, recipe)
    else:
        module, weights = _from_packed_directory(opened, arrays)
    fill(opened, module, _with_tied_head(opened, module, weights))
    return module


def _with_tied_head(opened: OpenedModel, module: Module, weights: Weights) -> Weights:
    """Returns `weights` to fit the head of `module`. If the module has no head, drops the head's weights, unless the
    config says that the model is not tied. If a tied model's module has a head, gives it the embedding's weights."""
    wanted = parameters_of(module)
    stems = {name.rpartition(".")[0] for name in wanted if HEAD.fullmatch(name)}
    if not is_untied(opened.config, opened.family):
        spare = [name for name in weights if HEAD.fullmatch(name) and name.rpartition(".")[0] not in stems]
        weights = {name: array for name, array in weights.items() if name not in spare}
    if is_tied(opened.module_config, opened.family):
        embeddings = [name.removesuffix(".weight") for name in wanted if name.endswith(EMBEDDINGS)]
        for stem in stems:
            weights |= {
                f"{stem}.{part}": array
                for part in ("weight", "scales", "biases", "global_scale")
                if (array := weights.get(f"{embeddings[0]}.{part}")) is not None
            }
    return weights


def fill(opened: OpenedModel, module: Module, weights: Weights) -> None:
    """Gives a fresh module its weights, and packed layers for packed weights. Raises ModelError if any do not fit."""
    quantize_layers(opened, module, weights)
    module.eval()  # some layers create their parameters only in this mode
    check_parameters(opened, parameters_of(module), weights)
    module.load_weights(list(weights.items()), strict=False)


def has_source_names(opened: OpenedModel) -> bool:
    """Returns True if the tensors have the names of their source. In a packed directory they have mlx-lm's names."""
    packed = any(tensor.scale is not None or name.endswith(".qweight") for name, tensor in opened.tensors.items())
    return opened.checkpoint.from_store or not packed


def build_module(opened: OpenedModel) -> tuple[Module, Defaults]:
    """Returns a fresh module with lazy random parameters, and the class defaults for fields that the config lacks.

    Build a new module for every use, because some `sanitize` methods change it. Raises ModelError if mlx-lm fails.
    """
    name = opened.family.import_name
    if (library := opened.family.library) is not None:
        return library.make_module(opened.family.module, opened.module_config), {}
    try:
        classes = importlib.import_module(name)
        replace_forwards()
        args_class, module_class = classes.ModelArgs, classes.Model
    except (ImportError, AttributeError, SystemExit) as error:  # one of mlx-lm's modules exits if a package is missing
        raise ModelError(f"unsupported architecture: {opened.architecture} ({name}: {error})") from error
    config = copy.deepcopy(opened.module_config)
    with fill_model_args() as (defaults, odd):
        try:
            module: Module = module_class(args_class.from_dict(config))
            mend(opened, module)
        except ModelError:
            raise
        except Exception as error:
            missing = ", ".join(field for field, value in defaults.items() if value is None)
            unlikely = dict.fromkeys(each for fields in odd for each in fields)
            notes = ", ".join(filter(None, (f"it lacks {missing}" if missing else "", *unlikely)))
            text = " ".join(str(error).split())  # to one line: MLX may list all types that it accepts
            why = f"{type(error).__name__}: {text:.200}{f' ({notes})' if notes else ''}"
            raise ModelError(f"config.json does not fit {name}: {why}") from error
    return module, class_defaults(args_class, config) | defaults


def _sanitized(opened: OpenedModel, weights: Weights, layout: ExpertLayout) -> tuple[Module, Weights]:
    """Returns a fresh module and the result of its `sanitize` for `weights` in `layout`."""
    module, _ = build_module(opened)
    try:
        with with_layout(weights, layout, opened.family.renamed) as named:
            sanitize, plain = getattr(module, "sanitize", None), from_fp8(named, fp8_block(opened.config))
            return module, _with_factors(plain if sanitize is None else dict(sanitize(plain)))
    except ModelError:
        raise
    except KeyError as error:
        raise ModelError(f"{opened.name} lacks a tensor: {error.args[0] if error.args else error}") from error
    except Exception as error:
        raise ModelError(
            f"{opened.family.import_name} cannot take the tensors of {opened.name}: {type(error).__name__}: {error}"
        ) from error


def _with_factors(weights: Weights) -> Weights:
    """Replaces each of MLX's global scales, which belongs to a tensor or an expert, by factors for each row."""
    for name in [name for name in weights if name.endswith(".global_scale")]:
        words = weights.get(f"{name.removesuffix('.global_scale')}.weight")
        if words is not None and words.dtype == mx.uint32:
            weights[name] = Arrays(words, global_scale=weights[name] / MLX_UNIT).factors.squeeze(-1)
    return weights


def _from_packed_directory(opened: OpenedModel, arrays: Mapping[str, Arrays]) -> tuple[Module, Weights]:
    weights: Weights = {}
    for name, item in arrays.items():
        stem = name.removesuffix(".weight")
        named = zip((name, f"{stem}.scales", f"{stem}.biases"), item, strict=False)
        weights |= {key: array for key, array in named if array is not None}
    is_awq = any(name.endswith(".qweight") for name in weights)
    return _sanitized(opened, from_awq(weights) if is_awq else weights, "as stored")
