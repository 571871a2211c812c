"""Unpacks weights at load, on CPUs: MLX's CPU kernels for packed weights are many times slower than a BLAS.

A layer is replaced by the one that it was quantized from, with weights in float32, so that it computes the same up to
rounding. That takes 4 to 8 times the memory, so it is done for as many layers as fit.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from runner.logs import Log
from runner.model.packing import WORD_BITS
from runner.model.progress import Progress
from runner.model.weights.quantized_layers import GloballyScaledLinear, GloballyScaledSwitchLinear

log = Log(__name__)

_PLAIN: dict[type[Module], type[Module]] = {
    QuantizedLinear: Linear,
    GloballyScaledLinear: Linear,
    QuantizedMultiLinear: MultiLinear,
    QuantizedEmbedding: Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    GloballyScaledSwitchLinear: SwitchLinear,
}
"""The class of a packed layer -> the class that computes the same with plain weights."""
PACKED_PARTS = ("weight", "scales", "biases", "global_scale")
"""The parameters that packed weights are made of."""


class PackedLayer(NamedTuple):
    """A packed layer that can be unpacked, and the order in which that pays."""

    rank: int
    path: str
    layer: Module

    @property
    def unpacked_bytes(self) -> int:
        """The bytes of its weights in float32."""
        return cast("int", self.layer.weight.size * WORD_BITS // self.layer.bits * mx.float32.size)


def packed_layers(module: Module) -> list[PackedLayer]:
    """Returns the layers that can be unpacked, those first that gain most for their bytes.

    Layers that every token passes come first; then the head, which a prompt passes with its last token only; then
    experts, of which a token passes a few. An embedding that is not also the head is looked up, which gains nothing.
    The module may hold placeholders.
    """
    return sorted(_packed_layers(module), key=lambda each: each.rank)


def _packed_layers(module: Module) -> Iterator[PackedLayer]:
    leaves = cast("list[tuple[str, Module]]", tree_flatten(module.leaf_modules(), is_leaf=Module.is_module))
    has_head = any(path.rpartition(".")[2] == "lm_head" for path, _ in leaves)
    for path, layer in leaves:
        if type(layer) is QuantizedEmbedding:
            if not has_head:
                yield PackedLayer(1, path, layer)
        elif type(layer) in _PLAIN:
            is_head = path.rpartition(".")[2] == "lm_head"
            is_expert = _PLAIN[type(layer)] is SwitchLinear
            yield PackedLayer(2 if is_expert else int(is_head), path, layer)


def unpack_layers(module: Module, paths: Collection[str]) -> None:
    """Unpacks these layers of `module` one by one, so that memory holds both forms of one layer only."""
    waiting = [each for each in packed_layers(module) if each.path in paths]
    progress = Progress(log, "unpacking", sum(each.unpacked_bytes for each in waiting))
    while waiting:
        packed = waiting.pop()  # no list may keep it once it is replaced
        plain = _unpacked(packed.layer)
        mx.eval(plain.parameters())
        module.update_modules(tree_unflatten([(packed.path, plain)]))
        progress.add(packed.unpacked_bytes)
        mx.clear_cache()


def _unpacked(layer: Module) -> Module:
    weight = mx.dequantize(
        layer["weight"],
        layer["scales"],
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=mx.float32,
    )
    if layer.get("global_scale") is not None:
        weight *= layer["global_scale"][..., None]
    plain = Module.__new__(_PLAIN[type(layer)])
    Module.__init__(plain)  # without the weights, which a class would make at random
    plain.weight = weight
    if "bias" in layer:
        plain.bias = layer["bias"]
    plain.eval()
    return plain
