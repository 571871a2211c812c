"""Replaces each layer that has packed weights by a layer that computes with packed weights."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QQLinear, QuantizedEmbedding, QuantizedLinear
from mlx.nn.layers.quantized import quantize as mlx_quantize
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.bitlinear_layers import bitnet_quantize
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from runner.errors import FaultsError, ModelError
from runner.model.architectures import METAL_ONLY
from runner.model.opened import OpenedModel
from runner.model.packing import Packing, find_packing
from runner.model.weights.experts import Weights
from runner.model.weights.packed import Arrays
from runner.model.weights.parameters import tensor_place

MLX_UNIT = 2688.0
"""MLX's global scale is the largest absolute weight: this number times the factor by which outputs are multiplied."""


class GloballyScaledLinear(QuantizedLinear):
    """A packed linear layer that multiplies its outputs by `global_scale` [out], in float32, for NVIDIA's nvfp4 exports
    (docs/internals/store.md, 2.5). MLX has no such layer for all devices. Made with the shape of `linear`."""

    def __init__(self, linear: QuantizedLinear) -> None:
        out_dims, words = linear.weight.shape
        in_dims = words * 32 // linear.bits
        super().__init__(in_dims, out_dims, "bias" in linear, linear.group_size, linear.bits, linear.mode)
        self.global_scale = mx.ones((out_dims,))

    def __call__(self, x: mx.array) -> mx.array:
        """Maps `x` [..., in] to [..., out] in the type of `x`."""
        product = mx.quantized_matmul(
            x, self.weight, self.scales, group_size=self.group_size, bits=self.bits, mode=self.mode
        )
        product = (product.astype(mx.float32) * self.global_scale).astype(x.dtype)
        return product + self.bias if "bias" in self else product


class GloballyScaledSwitchLinear(QuantizedSwitchLinear):
    """A packed layer of experts that multiplies its outputs by `global_scale` [E, out]. Has the shape of `switch`."""

    def __init__(self, switch: QuantizedSwitchLinear) -> None:
        sizes = switch.input_dims, switch.output_dims, switch.num_experts
        super().__init__(*sizes, "bias" in switch, switch.group_size, switch.bits, switch.mode)
        self.global_scale = mx.ones((switch.num_experts, switch.output_dims))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Maps `x` [..., 1, in] to [..., K, 1, out] for the experts `indices` [..., K] of each row, in the type of
        `x`."""
        product = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            rhs_indices=indices,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=sorted_indices,
        )
        factors = mx.expand_dims(self.global_scale[indices], -2)
        product = (product.astype(mx.float32) * factors).astype(x.dtype)
        return product + mx.expand_dims(self.bias[indices], -2) if "bias" in self else product


class WideEmbedding(QuantizedEmbedding):
    """A packed embedding that returns float32 rows. In floating-point modes MLX's own class returns bfloat16, and all
    later layers would compute in that type."""

    def __call__(self, x: mx.array) -> mx.array:
        """Maps token ids [...] to rows [..., dims] in float32."""
        parts = self["weight"][x], self["scales"][x], self["biases"][x] if "biases" in self else None
        return mx.dequantize(*parts, self.group_size, self.bits, self.mode, dtype=mx.float32)


_SCALED: dict[type[Module], Callable[[Any], Module]] = {
    QuantizedLinear: GloballyScaledLinear,
    QuantizedSwitchLinear: GloballyScaledSwitchLinear,
}


def check_kernels(opened: OpenedModel) -> None:
    """Raises ModelError if the module has no kernels for this machine. mlx-lm would fail only at the first request."""
    if (opened.family.module in METAL_ONLY or _is_bitnet(opened)) and not mx.metal.is_available():
        raise ModelError(f"unsupported architecture: {opened.architecture} runs on Apple Silicon (Metal) only")


def _is_bitnet(opened: OpenedModel) -> bool:
    declared = opened.config.get("quantization_config")
    return isinstance(declared, dict) and declared.get("quant_method") == "bitnet"


def quantize_layers(opened: OpenedModel, module: Module, weights: Weights) -> None:
    """Gives every layer with packed weights its quantized class. Unpacks the weights if there is no such class."""
    if _is_bitnet(opened):
        bitnet_quantize(module, cast("dict[str, object]", opened.config["quantization_config"]))
        return
    if not any(name.endswith(".scales") for name in weights):
        return

    faults: list[ModelError] = []

    def parameters(path: str, layer: Module) -> bool | dict[str, object]:
        words, scales = weights.get(f"{path}.weight"), weights.get(f"{path}.scales")
        if scales is None or words is None or words.dtype != mx.uint32 or "weight" not in layer:
            return False
        if layer["weight"].dtype == mx.uint32:  # the module was built with packed layers
            return False
        in_dims = layer["weight"].shape[-1]
        found = find_packing(in_dims, words.shape[-1], scales.shape[-1], byte_scales=scales.dtype == mx.uint8)
        if found is None:
            fault = f"{words.shape[-1]} packed words and {scales.shape[-1]} scales a row match no quantization of"
            faults.append(ModelError(f"{tensor_place(opened, f'{path}.weight')}: {fault} {in_dims} inputs"))
            return False
        options = _options(layer, found)
        if options is not None:
            return options
        parts = (weights.pop(f"{path}.{part}", None) for part in ("scales", "biases", "global_scale"))
        weights[f"{path}.weight"] = Arrays(words, *parts).unpacked(found)
        return False

    mlx_quantize(module, class_predicate=parameters)
    if faults:
        raise FaultsError(faults)
    changed = []
    for path, layer in cast("list[tuple[str, Module]]", tree_flatten(module.leaf_modules(), is_leaf=Module.is_module)):
        if f"{path}.global_scale" in weights and "scales" in layer:
            if type(layer) not in _SCALED:
                raise ModelError(
                    f"{tensor_place(opened, f'{path}.weight')}: a global scale needs a packed linear layer"
                )
            changed.append((path, _SCALED[type(layer)](layer)))
        elif _quantizes_activations(opened) and type(layer) is QuantizedLinear:
            changed.append((path, _with_quantized_inputs(opened, path, layer)))
    if changed:
        module.update_modules(tree_unflatten(changed))


def _options(layer: Module, found: Packing) -> dict[str, object] | None:
    """Returns the arguments for the layer's `to_quantized`; None if that is missing or lacks this packing."""
    to_quantized = getattr(layer, "to_quantized", None)
    if to_quantized is None:
        return None
    options: dict[str, object] = {"bits": found.bits, "group_size": found.group_size}
    if "mode" in inspect.signature(to_quantized).parameters:
        return {**options, "mode": found.mode}
    return options if found.mode == "affine" else None


def _quantizes_activations(opened: OpenedModel) -> bool:
    """Returns True if a directory's config asks for quantized activations, as mlx-lm's converter writes it, and the
    device can compute with them."""
    asked = not opened.checkpoint.from_store and opened.config.get("quantize_activations") is True
    return asked and mx.default_device() != mx.Device(mx.cpu)


def _with_quantized_inputs(opened: OpenedModel, path: str, layer: QuantizedLinear) -> QQLinear:
    if layer.mode not in ("nvfp4", "mxfp8") or "bias" in layer:
        raise ModelError(
            f"{tensor_place(opened, f'{path}.weight')}: quantize_activations wants nvfp4 or mxfp8 without a bias,"
            f" found {layer.mode}{' with one' if 'bias' in layer else ''}"
        )
    out_dims, words = layer.weight.shape
    return QQLinear(words * 32 // layer.bits, out_dims, layer.group_size, layer.bits, layer.mode)


def widen_embeddings(module: Module) -> None:
    """Makes packed embeddings return float32, for a module in which all other layers compute in float32."""
    for layer in module.modules():
        if type(layer) is QuantizedEmbedding:
            layer.__class__ = WideEmbedding
