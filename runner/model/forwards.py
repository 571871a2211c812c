"""Replaces parts of the forwards of mlx-lm's and mlx-vlm's modules by faster ones with the same results.

mlx-lm computes most recurrences token by token, with several operations each: the functions of `scans` compute all
tokens at once. `latent` chooses the cheaper form of latent attention. Keys that an indexer has chosen are put in order.
On a CPU, rows are not sorted by their experts: products do that. The experts of DBRX are computed together here: mlx-lm
computes them token by token in Python, and waits for each layer's choice of experts while it builds a forward.
"""

import re
import sys
from collections.abc import Callable, Mapping
from functools import update_wrapper
from types import ModuleType
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import SwitchGLU

from runner.model.latent import choose_form
from runner.model.scans.functions import FUNCTIONS, METHODS, constants
from runner.model.scans.kernel import cpu_kernel, on_cpu

_MODELS = ("mlx_lm.models.", "mlx_vlm.models.", "runner.model.modules.")
_APART = re.compile(r"(.+\.ffn)\.experts\.(\d+)\.(w1|v1|w2)\.(\w+)")
_NAMES = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}
"""An expert's layer in mlx-lm's dbrx -> in its layers for several experts."""

_SORTING: Mapping[str, Callable[..., Any]] = {
    "_gather_sort": lambda own, x, experts: (x, experts, None) if mx.default_device() == mx.cpu else own(x, experts),
    "_scatter_unsort": lambda own, x, order, *shape: x if order is None else own(x, order, *shape),
}
"""mlx-lm sorts the rows of many tokens by their experts. On a CPU products do that, and other operations than those of
few tokens would round otherwise."""


def _in_order(own: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Returns the keys that an indexer of mlx-lm chooses for each token, in the order of the text. A partition leaves
    them in an order that depends on all other keys, and sums over them would round otherwise."""
    match found := own(*args, **kwargs):
        case mx.array() if found.shape[-2] == 1:  # for several tokens, DeepSeek V3.2 makes a mask of them
            return mx.sort(found, axis=-1)
        case mx.array() as chosen, candidates:  # of DeepSeek V4.1, which has -1 for none: they go last
            return mx.sort(chosen.view(mx.uint32), axis=-1).view(mx.int32), candidates
    return found


_WINDOWS: Mapping[str, Callable[..., Any]] = {"_window_indices": lambda own, **sizes: mx.sort(own(**sizes), axis=-1)}
"""The keys of a window that lie before the chosen ones: those that a token does not have go first."""


def sparsemixer(
    own: Callable[..., tuple[mx.array, mx.array]], gates: mx.array, *, top_k: int, jitter_eps: float
) -> tuple[mx.array, mx.array]:
    """Chooses the experts of Phi MoE and their weights, in one operation if the kernels are in use."""
    kernel = cpu_kernel("sparsemixer") if on_cpu() and gates.dtype == mx.float32 and gates.size else None
    if kernel is None:
        return own(gates, top_k=top_k, jitter_eps=jitter_eps)
    shape = (*gates.shape[:-1], top_k)
    like = {"output_shapes": [shape, shape], "output_dtypes": [mx.uint32, mx.float32]}
    chosen, weights = kernel(inputs=[gates, constants(2 * jitter_eps)], **like)
    return chosen, weights


def replace_forwards() -> None:
    """Replaces these parts in all modules of models that were imported so far. Call it after each import of one: a
    module may have imported others, whose classes it uses."""
    for name, module in [*sys.modules.items()]:
        if name.startswith(_MODELS):
            _replace(module, {**FUNCTIONS, **_SORTING, **_WINDOWS, "sparsemixer": sparsemixer})
            _mend_dbrx(module)
            for kind in vars(module).values():
                if isinstance(kind, type) and kind.__module__ == name:
                    _replace(kind, METHODS)
                    if not name.startswith("mlx_vlm."):  # whose attention chooses by itself
                        _replace(kind, {"__call__": _in_order} if kind.__name__ == "Indexer" else {})
                        choose_form(kind)


def _replace(owner: object, replacements: Mapping[str, Callable[..., Any]]) -> None:
    for name in replacements.keys() & vars(owner).keys():
        own = vars(owner)[name]
        if not hasattr(own, "__wrapped__"):
            setattr(owner, name, _bound(replacements[name], own))


def _bound(function: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with mlx-lm's own as its first argument, and with the signature of that."""

    def call(*args: object, **kwargs: object) -> object:
        return function(own, *args, **kwargs)

    return update_wrapper(call, own)


def _mend_dbrx(module: ModuleType) -> None:
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
