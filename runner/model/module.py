"""From arrays to an mlx-lm module: its `sanitize`, its quantized layers, and a check of every parameter.

Nothing here evaluates anything, so the same functions run first on placeholders of the right shapes, before a byte of
weights is read, and then on the real arrays (store.md, section 0, steps 6 to 10).
"""

import copy
import dataclasses
import importlib
from collections.abc import Mapping
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedLinear, quantize
from mlx.utils import tree_flatten, tree_unflatten

import runner.mlxlm  # noqa: F401  # registers mlx_lm without its __init__
from runner.errors import ModelError
from runner.model import awq
from runner.model.opened import OpenedModel
from runner.model.quantization import packing

_LISTED = 6
"""How many tensors a message names before it only counts them."""

Weights = dict[str, mx.array]


class Arrays(NamedTuple):
    """The arrays of one logical tensor; the fields of `checkpoint.Tensor`, in its order."""

    weight: mx.array
    scale: mx.array | None = None
    bias: mx.array | None = None
    global_scale: mx.array | None = None


class GloballyScaledLinear(QuantizedLinear):
    """A quantized linear layer with one factor for its product, as NVIDIA's nvfp4 exports want (store.md, 2.5)."""

    def __init__(self, linear: QuantizedLinear) -> None:
        out_dims, words = linear.weight.shape
        in_dims = words * 32 // linear.bits
        super().__init__(in_dims, out_dims, "bias" in linear, linear.group_size, linear.bits, linear.mode)
        self.global_scale = mx.ones(())

    def __call__(self, x: mx.array) -> mx.array:
        """`x` [..., in] -> [..., out] in the type of `x`; the scale is applied in float32."""
        product = mx.quantized_matmul(
            x,
            self.weight,
            scales=self.scales,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        product = (product.astype(mx.float32) * self.global_scale).astype(x.dtype)
        return product + self.bias if "bias" in self else product


def assemble(opened: OpenedModel, arrays: Mapping[str, Arrays]) -> Module:
    """The module that `opened` describes, holding `arrays` (still lazy). Raises ModelError if anything does not fit."""
    module, weights = _sanitized_roles(opened, arrays)
    _quantize(opened, module, weights)
    check_parameters(opened, dict(_flat(module.parameters())), weights)
    module.load_weights(list(weights.items()), strict=False)
    module.eval()
    return module


def _flat(tree: object) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(tree))


def _build(opened: OpenedModel) -> Module:
    """A fresh module with lazy random parameters; each use gets its own, since some `sanitize` methods change it."""
    name = f"mlx_lm.models.{opened.family.module}"
    try:
        classes = importlib.import_module(name)
        args_class, module_class = classes.ModelArgs, classes.Model
    except (ImportError, AttributeError) as error:
        raise ModelError(f"unsupported architecture: {opened.architecture} ({name}: {error})") from error
    config = copy.deepcopy(opened.module_config)
    try:
        module: Module = module_class(args_class.from_dict(config))
    except Exception as error:
        lacking = [field.name for field in dataclasses.fields(args_class) if _is_required(field)]
        lacking = [field for field in lacking if field not in config]
        why = f"it lacks {', '.join(lacking)}" if lacking else f"{type(error).__name__}: {error}"
        raise ModelError(f"config.json does not fit {name}: {why}") from error
    return module


def _is_required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _sanitized(opened: OpenedModel, weights: Weights) -> tuple[Module, Weights]:
    """A fresh module and what its `sanitize` makes of `weights`, which it may change."""
    module = _build(opened)
    sanitize = getattr(module, "sanitize", None)
    if sanitize is None:
        return module, weights
    try:
        return module, dict(sanitize(weights))
    except Exception as error:
        raise ModelError(
            f"mlx_lm.models.{opened.family.module} cannot take the tensors of {opened.name}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _sanitized_roles(opened: OpenedModel, arrays: Mapping[str, Arrays]) -> tuple[Module, Weights]:
    """Module and weights by mlx-lm's names, packed tensors as `.weight`, `.scales` and `.biases`.

    A directory has these names already. A store has the source's names, which `sanitize` methods handle for plain
    weights only: they run once for the words, once for the scales, once for the biases, each under the plain name. A
    result is packed if words and scales came out in different shapes; no legal packing has them equal.
    """
    if not opened.checkpoint.from_store:
        weights = {key: array for name, item in arrays.items() for key, array in _mlx_names(name, item)}
        return _sanitized(opened, awq.to_mlx(weights) if awq.is_awq(weights) else weights)
    module, weights = _sanitized(opened, {name: item.weight for name, item in arrays.items()})
    if all(item.scale is None for item in arrays.values()):
        return module, weights
    _, scales = _sanitized(opened, {name: _or(item.scale, item.weight) for name, item in arrays.items()})
    _, biases = _sanitized(opened, {name: _or(item.bias, item.weight) for name, item in arrays.items()})
    if not weights.keys() == scales.keys() == biases.keys():
        raise ModelError(f"mlx_lm.models.{opened.family.module} has no way to take the packed tensors of {opened.name}")
    for name, words in list(weights.items()):
        if scales[name].shape == words.shape:
            continue
        stem = name.removesuffix(".weight")
        weights[f"{stem}.scales"] = scales[name]
        if biases[name].shape == scales[name].shape:
            weights[f"{stem}.biases"] = biases[name]
    for name, item in arrays.items():
        if item.global_scale is not None:
            weights[f"{name.removesuffix('.weight')}.global_scale"] = item.global_scale.reshape(())
    return module, weights


def _mlx_names(name: str, item: Arrays) -> list[tuple[str, mx.array]]:
    stem = name.removesuffix(".weight")
    named = [(name, item.weight), (f"{stem}.scales", item.scale), (f"{stem}.biases", item.bias)]
    return [(key, array) for key, array in named if array is not None]


def _or(array: mx.array | None, default: mx.array) -> mx.array:
    return default if array is None else array


def _quantize(opened: OpenedModel, module: Module, weights: Weights) -> None:
    """Gives every layer with packed weights its quantized class; unpacks the weights of layers that have none."""
    if not any(name.endswith(".scales") for name in weights):
        return

    def parameters(path: str, layer: Module) -> bool | dict[str, object]:
        scales = weights.get(f"{path}.scales")
        words = weights.get(f"{path}.weight")
        if scales is None or words is None or words.dtype != mx.uint32 or "weight" not in layer:
            return False
        in_dims = layer["weight"].shape[-1]
        found = packing(in_dims, words.shape[-1], scales.shape[-1], byte_scales=scales.dtype == mx.uint8)
        if found is None:
            raise ModelError(
                f"{_place(opened, f'{path}.weight')}: {words.shape[-1]} packed words and {scales.shape[-1]} scales "
                f"a row fit no quantization of {in_dims} inputs"
            )
        options: dict[str, object] = {"bits": found.bits, "group_size": found.group_size, "mode": found.mode}
        if hasattr(layer, "to_quantized"):
            return options
        del weights[f"{path}.scales"]
        weights[f"{path}.weight"] = mx.dequantize(
            words, scales, weights.pop(f"{path}.biases", None), found.group_size, found.bits, mode=found.mode
        )
        return False

    quantize(module, class_predicate=parameters)
    scaled = []
    leaves = tree_flatten(module.leaf_modules(), is_leaf=Module.is_module)
    for path, layer in cast("list[tuple[str, Module]]", leaves):
        if f"{path}.global_scale" in weights:
            if type(layer) is not QuantizedLinear:
                raise ModelError(f"{_place(opened, f'{path}.weight')}: a global scale needs a packed linear layer")
            scaled.append((path, GloballyScaledLinear(layer)))
    if scaled:
        module.update_modules(tree_unflatten(scaled))


def check_parameters(opened: OpenedModel, wanted: Mapping[str, mx.array], found: Mapping[str, mx.array]) -> None:
    """Compares names, shapes and kinds of type. Raises ModelError that lists what is missing or says what differs."""
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ModelError(f"{opened.name} lacks {len(missing)} tensors: {_listed(missing)}{_advice(opened)}")
    extra = sorted(found.keys() - wanted.keys())
    if extra:
        raise ModelError(
            f"{opened.name} holds {len(extra)} tensors that mlx_lm.models.{opened.family.module} does not know: "
            f"{_listed(extra)}{_advice(opened)}"
        )
    for name, want in wanted.items():
        have = found[name]
        if have.shape != want.shape:
            raise ModelError(f"{_place(opened, name)}: want shape {list(want.shape)}, found {list(have.shape)}")
        if _is_float(have) != _is_float(want):
            what = "a floating-point type" if _is_float(want) else str(want.dtype).removeprefix("mlx.core.")
            raise ModelError(f"{_place(opened, name)}: want {what}, found {str(have.dtype).removeprefix('mlx.core.')}")


def _advice(opened: OpenedModel) -> str:
    """What to do about a directory in a packing that is neither MLX's nor one that its module unpacks."""
    declared = opened.config.get("quantization_config")
    method = declared.get("quant_method") if isinstance(declared, dict) else None
    return f" (its packing is {method!r}: convert it with mlx_lm.convert)" if method else ""


def _is_float(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.floating))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def _place(opened: OpenedModel, name: str) -> str:
    """The tensor with its file, where `sanitize` left its name alone."""
    stem, _, last = name.rpartition(".")
    tensor = opened.tensors.get(name) or opened.tensors.get(f"{stem}.weight" if last in ("scales", "biases") else "")
    return f"tensor {name}" if tensor is None else f"{tensor.weight.file}: tensor {name}"
