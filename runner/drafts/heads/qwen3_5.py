"""The head of Qwen 3.5, dense and with experts, and of Qwen3-Next: one layer of full attention, as the target's."""

import copy
import re
from collections.abc import Callable, Collection
from typing import Self, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from runner.drafts.heads.head import HeadModule
from runner.errors import ModelError
from runner.model.weights.experts import Weights

_NORMS = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
_LAYER_NORM = re.compile(r"layers\.\d+\.(?:.+_layernorm|self_attn\.[qk]_norm)\.weight")
_FUSED = re.compile(r"(.+)\.experts\.gate_up_proj(?:\.weight)?")
_DOWN = re.compile(r"(.+)\.experts\.down_proj")
_NUMBER = re.compile(r"layers\.(\d+)\.")


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
        count = 1 + max((int(match[1]) for match in map(_NUMBER.match, names) if match), default=0)
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
            if match := _FUSED.fullmatch(name):
                middle = array.shape[-2] // 2
                result[f"{match[1]}.switch_mlp.gate_proj.weight"] = array[..., :middle, :]
                result[f"{match[1]}.switch_mlp.up_proj.weight"] = array[..., middle:, :]
            elif match := _DOWN.fullmatch(name):
                result[f"{match[1]}.switch_mlp.down_proj.weight"] = array
            else:
                result[name] = array + 1.0 if name in shifted and array.ndim == 1 else array
        return result

    @classmethod
    def norms(cls, names: Collection[str], *, all_of_them: bool) -> set[str]:
        """Returns the norms among these names whose published weights lack 1: all, or those that a release which had
        added it to the layers' left as they were."""
        found = {name for name in names if name in _NORMS}
        return found | {name for name in names if _LAYER_NORM.fullmatch(name)} if all_of_them else found
