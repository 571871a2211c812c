"""Quantized layers with a global scale, for NVIDIA's nvfp4 exports (docs/internals/store.md, 2.5).

MLX's own layers have no global scale that works on all devices. Here the output is multiplied by it, in float32.
"""

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedLinear

import runner.process.lean_mlx_lm  # noqa: F401  # registers mlx_lm without its __init__

# isort: split
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

MLX_UNIT = 2688.0
"""MLX's global scale is the largest absolute weight, which is this many times the factor."""


class GloballyScaledLinear(QuantizedLinear):
    """A linear layer whose outputs are multiplied by `global_scale` [out]. Copies another's shape, not its weights."""

    def __init__(self, linear: QuantizedLinear) -> None:
        out_dims, words = linear.weight.shape
        in_dims = words * 32 // linear.bits
        super().__init__(in_dims, out_dims, "bias" in linear, linear.group_size, linear.bits, linear.mode)
        self.global_scale = mx.ones((out_dims,))

    def __call__(self, x: mx.array) -> mx.array:
        """Maps `x` [..., in] to [..., out] in the type of `x`."""
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


class GloballyScaledSwitchLinear(QuantizedSwitchLinear):
    """A layer of experts whose outputs are multiplied by `global_scale` [E, out]. Made like the linear one."""

    def __init__(self, switch: QuantizedSwitchLinear) -> None:
        sizes = switch.input_dims, switch.output_dims, switch.num_experts
        super().__init__(*sizes, "bias" in switch, switch.group_size, switch.bits, switch.mode)
        self.global_scale = mx.ones((switch.num_experts, switch.output_dims))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Maps `x` [..., 1, in] and the experts [..., K] of each row to [..., K, 1, out] in the type of `x`."""
        product = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            rhs_indices=indices,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=sorted_indices,
        )
        factors = mx.expand_dims(self.global_scale[indices], -2)
        product = (product.astype(mx.float32) * factors).astype(x.dtype)
        return product + mx.expand_dims(self.bias[indices], -2) if "bias" in self else product


def with_global_scale(layer: Module) -> Module | None:
    """Returns the layer with a global scale that replaces `layer`; None if there is none for its class."""
    if type(layer) is QuantizedLinear:
        return GloballyScaledLinear(layer)
    return GloballyScaledSwitchLinear(layer) if type(layer) is QuantizedSwitchLinear else None
