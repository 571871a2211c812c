"""The head of Nemotron-H: layers of attention, experts or plain projections behind the joined input."""

import re
from collections.abc import Callable, Collection
from typing import Self, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.nemotron_h import ModelArgs, NemotronHBlock

from runner.drafts.heads.head import HeadModule
from runner.errors import ModelError
from runner.model.weights.experts import Weights

_KINDS = (
    ("*", re.compile(r"mixer\.[qkvo]_proj\.")),
    ("E", re.compile(r"mixer\.(?:gate|experts|switch_mlp)\.")),
    ("M", re.compile(r"mixer\.(?:in_proj|conv1d|A_log)")),
    ("-", re.compile(r"mixer\.(?:up|down)_proj\.")),
)
"""What mlx-lm calls a kind of layer, and the tensors that only such a layer has."""
_PLACED = {
    "enorm.weight": ("pre_fc_norm_embedding.weight", "layers.{first}.enorm.weight"),
    "hnorm.weight": ("pre_fc_norm_hidden.weight", "layers.{first}.hnorm.weight"),
    "eh_proj.weight": ("fc.weight", "layers.{first}.eh_proj.weight"),
    "final_layernorm.weight": (
        "norm.weight", "shared_head.norm.weight", "layers.{last}.final_layernorm.weight",
    ),
}  # fmt: skip
"""Parameter -> the names that packages have for it, the first that is there."""
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERTS = re.compile(r"(.+\.mixer\.switch_mlp)\.(up|down)_proj\.weight")


class NemotronHead(HeadModule):
    """Joins the row of the next token to the hidden state before it."""

    def __init__(self, args: ModelArgs, kinds: str) -> None:
        super().__init__()
        width, eps = args.hidden_size, args.layer_norm_epsilon
        self.enorm = RMSNorm(width, eps)
        self.hnorm = RMSNorm(width, eps)
        self.eh_proj = Linear(2 * width, width, bias=False)
        self.layers = [cast("Callable[[ModelArgs, str], Module]", NemotronHBlock)(args, kind) for kind in kinds]
        self.final_layernorm = RMSNorm(width, eps)
        self._kinds = kinds

    @classmethod
    def of_target(cls, args: object, names: Collection[str]) -> Self:
        assert isinstance(args, ModelArgs)
        layers: dict[int, list[str]] = {}
        for match in filter(None, map(_LAYER.fullmatch, names)):
            layers.setdefault(int(match[1]), []).append(match[2])
        if not layers:
            raise ModelError("it lacks its layers")
        kinds = ""
        for _, parts in sorted(layers.items()):
            kind = next((kind for kind, pattern in _KINDS if any(map(pattern.match, parts))), "")
            if kind not in ("*", "E", "-"):
                raise ModelError(f"one of its layers is {'recurrent' if kind else 'of an unknown kind'}")
            kinds += kind
        return cls(args, kinds)

    @property
    def attentions(self) -> int:
        return self._kinds.count("*")

    def __call__(self, embedded: mx.array, hidden: mx.array, layers: list[KVCache]) -> mx.array:
        x = self.eh_proj(mx.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1))
        mask = create_attention_mask(x, layers[0]) if layers else None
        caches = iter(layers)
        for kind, layer in zip(self._kinds, self.layers, strict=True):
            x = layer(x, mask=mask, cache=next(caches)) if kind == "*" else layer(x)
        return cast("mx.array", self.final_layernorm(x))

    @classmethod
    def renamed(cls, names: Collection[str]) -> dict[str, str]:
        numbers = sorted({int(match[1]) for match in map(_LAYER.fullmatch, names) if match})
        if not numbers:
            return {name: name for name in names}
        places = {number: place for place, number in enumerate(numbers)}
        result = {}
        for name in names:
            match = _LAYER.fullmatch(name)
            result[name] = f"layers.{places[int(match[1])]}.{match[2]}" if match else name
        for parameter, stored in _PLACED.items():
            known = (name.format(first=numbers[0], last=numbers[-1]) for name in stored)
            if found := next((name for name in known if name in names), None):
                result[found] = parameter
        return result

    @classmethod
    def sanitize(cls, weights: Weights, *, shifted: Collection[str]) -> Weights:  # noqa: ARG003  none does
        parts = {"up": "fc1", "down": "fc2"}
        return {_EXPERTS.sub(lambda match: f"{match[1]}.{parts[match[2]]}.weight", name): array
                for name, array in weights.items()}  # fmt: skip
