"""The heads of families: Qwen 3.5, dense and with experts, and Qwen3-Next; Nemotron-H."""

import copy
import re
from collections.abc import Callable, Collection
from typing import Self, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import nemotron_h, qwen3_5, qwen3_next
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from runner.drafts.heads.head import HeadModule
from runner.errors import ModelError
from runner.model.weights.experts import Weights

# --- Qwen: layers of full attention, as the target's.

_QWEN_NORMS = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
_QWEN_NORM = re.compile(r"layers\.\d+\.(?:.+_layernorm|self_attn\.[qk]_norm)\.weight")
_QWEN_FUSED = re.compile(r"(.+)\.experts\.gate_up_proj(?:\.weight)?")
_QWEN_DOWN = re.compile(r"(.+)\.experts\.down_proj")
_QWEN_LAYER = re.compile(r"layers\.(\d+)\.")


class QwenHead(HeadModule):
    """Joins the row of the next token to the hidden state before it."""

    def __init__(self, width: int, eps: float, layers: list[Module]) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(width, eps)
        self.pre_fc_norm_hidden = RMSNorm(width, eps)
        self.fc = Linear(2 * width, width, bias=False)
        self.layers = layers
        self.norm = RMSNorm(width, eps)

    @classmethod
    def of_target(cls, args: object, names: Collection[str]) -> Self:
        if "fc.weight" not in names:
            raise ModelError("it lacks mtp.fc.weight")
        count = 1 + max((int(match[1]) for match in map(_QWEN_LAYER.match, names) if match), default=0)
        if count > len(names):
            raise ModelError(f"it lacks most of {count} layers")
        own = copy.copy(cast("qwen3_5.TextModelArgs", args))
        own.full_attention_interval = 1
        if not any(".mlp.switch_mlp." in name or ".mlp.experts." in name for name in names):
            own.num_experts = 0
        kind: object = qwen3_5.DecoderLayer
        if isinstance(args, qwen3_next.ModelArgs):
            vars(own).update(decoder_sparse_step=1, mlp_only_layers=[])
            kind = qwen3_next.Qwen3NextDecoderLayer
        make = cast("Callable[[object, int], Module]", kind)
        return cls(own.hidden_size, own.rms_norm_eps, [make(own, 0) for _ in range(count)])

    @property
    def attentions(self) -> int:
        return len(self.layers)

    def __call__(self, embedded: mx.array, hidden: mx.array, layers: list[KVCache]) -> mx.array:
        joined = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(joined, axis=-1))
        mask = create_attention_mask(x, layers[0])
        for layer, cache in zip(self.layers, layers, strict=True):
            x = layer(x, mask=mask, cache=cache)
        return cast("mx.array", self.norm(x))

    @classmethod
    def renamed(cls, names: Collection[str]) -> dict[str, str]:
        return {name: name for name in names}

    @classmethod
    def sanitize(cls, weights: Weights, *, shifted: Collection[str]) -> Weights:
        result: Weights = {}
        for name, array in weights.items():
            if match := _QWEN_FUSED.fullmatch(name):
                middle = array.shape[-2] // 2
                result[f"{match[1]}.switch_mlp.gate_proj.weight"] = array[..., :middle, :]
                result[f"{match[1]}.switch_mlp.up_proj.weight"] = array[..., middle:, :]
            elif match := _QWEN_DOWN.fullmatch(name):
                result[f"{match[1]}.switch_mlp.down_proj.weight"] = array
            else:
                result[name] = array + 1.0 if name in shifted and array.ndim == 1 else array
        return result

    @classmethod
    def norms(cls, names: Collection[str], *, all_of_them: bool) -> set[str]:
        """Returns the norms among these names whose published weights lack 1: all, or those that a release which had
        added it to the layers' left as they were."""
        found = {name for name in names if name in _QWEN_NORMS}
        return found | {name for name in names if _QWEN_NORM.fullmatch(name)} if all_of_them else found


# --- Nemotron-H: layers of attention, experts or plain projections after the joined input.

_NEMOTRON_KINDS = (
    ("*", re.compile(r"mixer\.[qkvo]_proj\.")),
    ("E", re.compile(r"mixer\.(?:gate|experts|switch_mlp)\.")),
    ("M", re.compile(r"mixer\.(?:in_proj|conv1d|A_log)")),
    ("-", re.compile(r"mixer\.(?:up|down)_proj\.")),
)
"""What mlx-lm calls a kind of layer, and the tensors that only such a layer has."""
_NEMOTRON_NAMES = {
    "enorm.weight": ("pre_fc_norm_embedding.weight", "layers.{first}.enorm.weight"),
    "hnorm.weight": ("pre_fc_norm_hidden.weight", "layers.{first}.hnorm.weight"),
    "eh_proj.weight": ("fc.weight", "layers.{first}.eh_proj.weight"),
    "final_layernorm.weight": (
        "norm.weight", "shared_head.norm.weight", "layers.{last}.final_layernorm.weight",
    ),
}  # fmt: skip
"""Parameter -> the names that packages have for it, the first that is there."""
_NEMOTRON_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_NEMOTRON_EXPERTS = re.compile(r"(.+\.mixer\.switch_mlp)\.(up|down)_proj\.weight")


class NemotronHead(HeadModule):
    """Joins the row of the next token to the hidden state before it."""

    def __init__(self, args: nemotron_h.ModelArgs, kinds: str) -> None:
        super().__init__()
        width, eps = args.hidden_size, args.layer_norm_epsilon
        self.enorm = RMSNorm(width, eps)
        self.hnorm = RMSNorm(width, eps)
        self.eh_proj = Linear(2 * width, width, bias=False)
        make = cast("Callable[[nemotron_h.ModelArgs, str], Module]", nemotron_h.NemotronHBlock)
        self.layers = [make(args, kind) for kind in kinds]
        self.final_layernorm = RMSNorm(width, eps)
        self._kinds = kinds

    @classmethod
    def of_target(cls, args: object, names: Collection[str]) -> Self:
        assert isinstance(args, nemotron_h.ModelArgs)
        layers: dict[int, list[str]] = {}
        for match in filter(None, map(_NEMOTRON_LAYER.fullmatch, names)):
            layers.setdefault(int(match[1]), []).append(match[2])
        if not layers:
            raise ModelError("it lacks its layers")
        kinds = ""
        for _, parts in sorted(layers.items()):
            kind = next((kind for kind, pattern in _NEMOTRON_KINDS if any(map(pattern.match, parts))), "")
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
        numbers = sorted({int(match[1]) for match in map(_NEMOTRON_LAYER.fullmatch, names) if match})
        if not numbers:
            return {name: name for name in names}
        places = {number: place for place, number in enumerate(numbers)}
        result = {}
        for name in names:
            match = _NEMOTRON_LAYER.fullmatch(name)
            result[name] = f"layers.{places[int(match[1])]}.{match[2]}" if match else name
        for parameter, stored in _NEMOTRON_NAMES.items():
            known = (name.format(first=numbers[0], last=numbers[-1]) for name in stored)
            if found := next((name for name in known if name in names), None):
                result[found] = parameter
        return result

    @classmethod
    def sanitize(cls, weights: Weights, *, shifted: Collection[str]) -> Weights:  # noqa: ARG003  none does
        parts = {"up": "fc1", "down": "fc2"}
        return {_NEMOTRON_EXPERTS.sub(lambda match: f"{match[1]}.{parts[match[2]]}.weight", name): array
                for name, array in weights.items()}  # fmt: skip
