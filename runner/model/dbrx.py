"""Experts of DBRX that are computed together. mlx-lm computes them token by token in Python, and waits for each layer's
choice of experts while it builds a forward."""

import re
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import SwitchGLU

_APART = re.compile(r"(.+\.ffn)\.experts\.(\d+)\.(w1|v1|w2)\.(\w+)")
_NAMES = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}
"""An expert's layer in mlx-lm's dbrx -> in its layers for several experts."""


def mend_dbrx(module: ModuleType) -> None:
    """Replaces the experts of mlx-lm's module `dbrx`, and their tensors' names. Does nothing to other modules."""
    if module.__name__ == "mlx_lm.models.dbrx" and not issubclass(module.SparseMoeBlock, _Experts):
        names = {"__module__": module.__name__}
        module.Model = type("Model", (_Sanitized, module.Model), names)  # type: ignore[attr-defined]
        module.SparseMoeBlock = type("SparseMoeBlock", (_Experts,), {**names, "router_class": module.Router})  # type: ignore[attr-defined]


class _Args(Protocol):
    d_model: int
    ffn_config: dict[str, int]


class _Experts(Module):
    router_class: Callable[[int, int], Module]

    def __init__(self, args: _Args) -> None:
        Module.__init__(self)  # MLX's __init__ is not typed
        experts = args.ffn_config["moe_num_experts"]
        self.chosen = args.ffn_config["moe_top_k"]
        self.router = self.router_class(args.d_model, experts)
        self.switch_mlp = SwitchGLU(args.d_model, args.ffn_config["ffn_hidden_size"], experts)

    def __call__(self, x: mx.array) -> mx.array:
        """Maps `x` [B, L, D] to the sums of its experts' results, weighted by their shares in the choice."""
        gates = mx.softmax(self.router(x).astype(mx.float32), axis=-1)
        indices = mx.stop_gradient(mx.argpartition(-gates, kth=self.chosen - 1, axis=-1)[..., : self.chosen])
        scores = mx.take_along_axis(gates, indices, axis=-1)
        scores = (scores / scores.sum(axis=-1, keepdims=True)).astype(x.dtype)
        return (self.switch_mlp(x, indices) * scores[..., None]).sum(axis=-2)


class _Sanitized:
    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Returns the weights under mlx-lm's names, with all experts of a layer in one stack."""
        apart: dict[str, mx.array] = super().sanitize(weights)  # type: ignore[misc]
        stacks: dict[str, dict[int, mx.array]] = {}
        for name in [name for name in apart if ".ffn.experts." in name]:
            block, expert, layer, part = _APART.fullmatch(name).groups()  # type: ignore[union-attr]
            stacks.setdefault(f"{block}.switch_mlp.{_NAMES[layer]}.{part}", {})[int(expert)] = apart.pop(name)
        return apart | {name: mx.stack([parts[each] for each in sorted(parts)]) for name, parts in stacks.items()}
