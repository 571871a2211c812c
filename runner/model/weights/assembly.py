"""Assembles an mlx-lm module from arrays, which nothing here evaluates (docs/internals/store.md, 0, steps 6 to 10)."""

import copy
import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.base import BaseModelArgs

from runner.errors import ModelError
from runner.model.config import EMBEDDINGS, HEAD, is_tied, is_untied
from runner.model.families import COMPUTED_TENSORS, Config
from runner.model.opened import OpenedModel
from runner.model.sources.checkpoint import Tensor
from runner.model.sources.safetensors import HeaderEntry
from runner.model.weights.experts import ExpertLayout, Weights, possible_layouts, with_layout
from runner.model.weights.mended import mend
from runner.model.weights.packed import Arrays, Recipe, find_recipe, sanitize_packed
from runner.model.weights.parameters import check_parameters, parameters_of
from runner.model.weights.quantized_layers import MLX_UNIT, check_kernels, quantize_layers

MLX_DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32,
    "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
    "C64": mx.complex64, "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip
"""Type in a file -> its type in MLX."""
Defaults = dict[str, object]
"""Values for fields that a config leaves out; None for those that a class requires but allows to be None."""


def map_arrays(opened: OpenedModel, make: Callable[[HeaderEntry], mx.array]) -> dict[str, Arrays]:
    """Returns the arrays of every needed tensor, each part made by `make`."""

    def arrays(tensor: Tensor) -> Arrays:
        _, weight, *companions = tensor
        return Arrays(make(weight), *(make(part) if part is not None else None for part in companions))

    return {name: arrays(tensor) for name, tensor in opened.tensors.items()}


def placeholders(opened: OpenedModel) -> dict[str, Arrays]:
    """Returns arrays of the right shapes and types, without data."""
    return map_arrays(opened, lambda entry: mx.zeros(entry.shape, MLX_DTYPES[entry.dtype]))


def rehearse(opened: OpenedModel) -> tuple[Module, Recipe]:
    """Builds the module on placeholders. Returns it with the recipe for its weights; ModelError if anything misfits."""
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
    """Returns the weights without a head that the module lacks, unless the config says that the model is not tied. If
    it is tied and the module has a head all the same, the embedding becomes its weights."""
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
    """Gives a fresh module its weights, in packed layers where they are packed. Raises ModelError if anything does not
    fit."""
    quantize_layers(opened, module, weights)
    module.eval()  # some layers create their parameters only in this mode
    check_parameters(opened, parameters_of(module), weights)
    module.load_weights(list(weights.items()), strict=False)


def has_source_names(opened: OpenedModel) -> bool:
    """Returns True if tensors have the names of their source; in a packed directory they have mlx-lm's own names."""
    packed = any(tensor.scale is not None or name.endswith(".qweight") for name, tensor in opened.tensors.items())
    return opened.checkpoint.from_store or not packed


def build_module(opened: OpenedModel) -> tuple[Module, Defaults]:
    """Returns a fresh module with lazy random parameters, and the defaults of its classes that it uses.

    Every use needs a fresh one, since some `sanitize` methods change it. Raises ModelError if mlx-lm cannot build it.
    """
    name = opened.family.import_name
    if (library := opened.family.library) is not None:
        return library.make_module(opened.family.module, opened.module_config), {}
    try:
        classes = importlib.import_module(name)
        args_class, module_class = classes.ModelArgs, classes.Model
    except (ImportError, AttributeError, SystemExit) as error:  # one of the modules exits where its package is missing
        raise ModelError(f"unsupported architecture: {opened.architecture} ({name}: {error})") from error
    config = copy.deepcopy(opened.module_config)
    with _fill_model_args() as (defaults, odd):
        try:
            module: Module = module_class(args_class.from_dict(config))
            mend(opened, module)
        except ModelError:
            raise
        except Exception as error:
            missing = ", ".join(field for field, value in defaults.items() if value is None)
            notes = ", ".join(filter(None, (f"it lacks {missing}" if missing else "", *dict.fromkeys(odd))))
            text = " ".join(str(error).split())  # MLX lists all types that it would take
            why = f"{type(error).__name__}: {text:.200}{f' ({notes})' if notes else ''}"
            raise ModelError(f"config.json does not fit {name}: {why}") from error
    return module, _class_defaults(args_class, config) | defaults


def _sanitized(opened: OpenedModel, weights: Weights, layout: ExpertLayout) -> tuple[Module, Weights]:
    """Returns a fresh module and the result of its `sanitize` for `weights` in `layout`."""
    module, _ = build_module(opened)
    try:
        with with_layout(weights, layout, opened.family.renamed) as named:
            sanitize, plain = getattr(module, "sanitize", None), _from_fp8(named, _fp8_block(opened.config))
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
    """Replaces MLX's global scales, one per tensor or expert, by factors for each row."""
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
    return _sanitized(opened, _from_awq(weights) if is_awq else weights, "as stored")


# --- The arguments of mlx-lm's model classes: a field missing from a config gets the default of its class. A class may
# pass a part of its config on to a class of another module. So the defaults are filled in for all of them, in the one
# method with which they read a config.

_METHOD = "from_dict"
_MAY_BE_NONE = re.compile(r"(typing\.)?(Optional\[.*\]|Any)|.*\| None")


@contextmanager
def _fill_model_args() -> Iterator[tuple[Defaults, list[str]]]:
    """Fills missing fields while mlx-lm's classes read a config. Yields the defaults used so far, and odd fields.

    Inside the block, reading a config raises a ModelError that names the missing fields without a default. Only for the
    thread that owns MLX: it patches mlx-lm.
    """
    defaults: Defaults = {}
    odd: list[str] = []
    genuine = BaseModelArgs.__dict__[_METHOD]

    def from_dict(cls: type[Any], config: Mapping[str, object]) -> object:
        odd.extend(_odd_fields(cls, config))
        return genuine.__func__(cls, _completed(cls, config, defaults))

    setattr(BaseModelArgs, _METHOD, classmethod(from_dict))
    try:
        yield defaults, odd
    finally:
        setattr(BaseModelArgs, _METHOD, genuine)


_KINDS = {
    bool: "bool|any", int: "int|float|any", float: "float|int|any", str: "str|any", list: "list|tuple|any",
    dict: "dict|any",
}  # fmt: skip
"""Type of a value in JSON -> the words for it in a class."""
_LARGEST = 2**31


def _odd_fields(cls: type[Any], config: Mapping[str, object]) -> Iterator[str]:
    """Yields the fields of `config` that may be the reason where `cls` cannot be made or used."""
    for field in dataclasses.fields(cls):
        value = config.get(field.name)
        if type(value) not in _KINDS:
            continue
        outer = re.sub(r"(dict|list|tuple)\[.*\]", r"\1", str(field.type).lower())
        if not re.search(_KINDS[type(value)], outer) or (isinstance(value, int | float) and not 0 <= value < _LARGEST):
            yield f"{field.name} is {value!r:.60}"


def _class_defaults(cls: type[Any], config: Mapping[str, object]) -> Defaults:
    """Returns the defaults of `cls` for fields that `config` leaves out, except those that are None."""
    defaults: Defaults = {}
    for field in dataclasses.fields(cls):
        if field.name in config:
            continue
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING and field.default is not None:
            defaults[field.name] = field.default
    return defaults


def _completed(cls: type[Any], config: Mapping[str, object], defaults: Defaults) -> Config:
    """Returns `config` with None for each missing field that `cls` requires but allows to be None.

    Raises ModelError for other missing fields.
    """
    filled = dict(config)
    lacking = []
    defaults |= _class_defaults(cls, config)
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name in filled or not required:
            continue
        if _MAY_BE_NONE.fullmatch(str(field.type)):
            filled[field.name] = defaults[field.name] = None
        else:
            lacking.append(field.name)
    if lacking:
        raise ModelError(f"config.json does not fit {cls.__module__}: it lacks {', '.join(lacking)}")
    return filled


# --- FP8 weights: bytes in `x.weight`, and in `x.weight_scale_inv` a scale for the tensor, for each expert or for each
# square block. A few of mlx-lm's modules know some of these forms; one takes the bytes for numbers.

_SCALE = "_scale_inv"
_ACTIVATIONS = ("activation_scale", "input_scale")
"""Scales of such a layer's input, which is not quantized here."""
_USUAL_BLOCK = 128


def _fp8_block(config: Config) -> int:
    """Returns the size of a block, in rows and in columns."""
    said = config.get("quantization_config")
    block = said.get("weight_block_size") if isinstance(said, dict) else None
    first = block[0] if isinstance(block, list) and block else None
    return first if type(first) is int and first > 0 else _USUAL_BLOCK


def _from_fp8(weights: Weights, block: int) -> Weights:
    """Returns `weights` with bfloat16 in place of bytes and scales; lazily."""
    plain = dict(weights)
    for name in [name for name in weights if name.endswith(_SCALE)]:
        path = name.removesuffix(_SCALE)
        scales, words = weights[name], weights.get(path)
        if words is None or words.dtype != mx.uint8 or words.ndim < 2 or not mx.issubdtype(scales.dtype, mx.floating):
            continue
        rows, columns = words.shape[-2:]
        if [*scales.shape[-2:]] == [-(-rows // block), -(-columns // block)]:
            scales = mx.repeat(mx.repeat(scales, block, -2), block, -1)[..., :rows, :columns]
        plain[path] = (mx.from_fp8(words, mx.float32) * scales).astype(mx.bfloat16)
        for key in (name, *(f"{path.removesuffix('weight')}{each}" for each in _ACTIVATIONS)):
            plain.pop(key, None)
    return plain


# --- Repacks AutoAWQ's 4-bit checkpoints for MLX: the same numbers in other places (AutoAWQ's `WQLinear_GEMM`).

_AWQ_BITS = 4
_AWQ_WORD = 32 // _AWQ_BITS
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds its n-th value."""


def _from_awq(weights: Weights) -> Weights:
    """Converts every `x.qweight`, `x.qzeros`, `x.scales` into `x.weight`, `x.scales`, `x.biases`; lazily.

    AWQ stores a layer as [in, out/8] with scales [in/group, out], MLX as [out, in/8] with [out, in/group]. A value is
    `(q - zero) * scale` in AWQ and `q * scale + bias` in MLX. Other floats get the type of the scales, as in mlx-lm.
    """
    stems = [name.removesuffix(".qweight") for name in weights if name.endswith(".qweight")]
    dtype = weights[f"{stems[0]}.scales"].dtype if f"{stems[0]}.scales" in weights else mx.float16
    converted = {
        name: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in weights.items()
        if name.rpartition(".")[0] not in stems or name.endswith(".bias")
    }
    for stem in stems:
        parts = [weights.get(f"{stem}.{part}") for part in ("qweight", "scales", "qzeros")]
        words, scales, zeros = parts
        integers = [part for part in (words, zeros) if part is not None]
        odd = any(part.ndim != 2 or part.dtype not in (mx.int32, mx.uint32) for part in integers)
        if f"{stem}.g_idx" in weights or words is None or scales is None or scales.ndim != 2 or odd:
            raise ModelError(f"tensor {stem}.qweight: not a 4-bit AWQ layer; convert the model with mlx_lm.convert")
        in_dims, out_dims = words.shape[0], words.shape[1] * _AWQ_WORD
        fits = zeros is None or zeros.shape == (scales.shape[0], words.shape[1])
        if scales.shape[1] != out_dims or in_dims % _AWQ_WORD or not fits:
            raise ModelError(f"tensor {stem}.qweight {list(words.shape)} does not fit scales {list(scales.shape)}")
        values = _nibbles(words).T.reshape(out_dims, in_dims // _AWQ_WORD, _AWQ_WORD).astype(mx.uint32)
        shifts = mx.arange(_AWQ_WORD, dtype=mx.uint32) * _AWQ_BITS
        converted[f"{stem}.weight"] = (values << shifts).sum(axis=-1).astype(mx.uint32)
        converted[f"{stem}.scales"] = columns = mx.contiguous(scales.T)
        offset = mx.array(1 << (_AWQ_BITS - 1)) if zeros is None else _nibbles(zeros).T
        converted[f"{stem}.biases"] = (-offset.astype(mx.float32) * columns).astype(dtype)
    return converted


def _nibbles(words: mx.array) -> mx.array:
    """Unpacks [rows, n/8] words into [rows, n] values 0..15."""
    nibbles = words[..., None] >> (mx.array(_AWQ_ORDER) * _AWQ_BITS) & 0xF
    return nibbles.reshape(words.shape[0], -1)
