"""Aleph Alpha's decoder with experts (`Kolibri1ForCausalLM`), built from mlx-lm's parts.

Most layers have a sliding window and rotary positions; the other layers see all tokens, without positions. There is a
norm before and after the attention, and before and after the experts. An expert's bias counts when experts are chosen,
but not in the weight of the expert's output.
"""

import re
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.exaone4 import MLP, Attention

from runner.model.decoder import FULL, SLIDING, DecoderArgs, DecoderModel, Experts, Mask

_PERIOD = 5
"""If the config has no `layer_types`, a layer whose number, from 1, is a multiple of this sees all tokens."""
_BIAS = re.compile(r"\.(moe\.router\.expert_bias|mlp\.gate\.e_score_correction_bias)$")
"""The end of the name of the experts' biases: the publisher's name, or mlx-vlm's."""


@dataclass
class ModelArgs(DecoderArgs):
    """The fields of `config.json`, with the defaults of transformers."""

    model_type: str
    vocab_size: int = 128000
    hidden_size: int = 2560
    num_hidden_layers: int = 50
    num_attention_heads: int = 48
    num_key_value_heads: int = 4
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, object] | None = None
    max_position_embeddings: int = 262144
    hidden_act: str = "silu"
    sliding_window: int = 513
    layer_types: list[str] | None = None
    num_experts: int = 384
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False
    head_dtype: str = ""
    """The type in which the head computes: "float32"; any other value means the type of the layers."""

    def __post_init__(self) -> None:
        """Fills in missing fields from other fields. Raises ValueError for contradictions and unknown values."""
        layers = self.num_hidden_layers
        if self.layer_types is None:
            self.layer_types = [SLIDING if (layer + 1) % _PERIOD else FULL for layer in range(layers)]
        self.check_layers("layer_types", SLIDING, FULL)
        self.check_experts()
        if self.hidden_act != "silu":
            raise ValueError(f'unsupported hidden_act: "{self.hidden_act}"')


class KolibriExperts(Experts):
    """A layer of experts: a few chosen ones for each token, and one that all tokens share."""

    def __init__(self, args: ModelArgs) -> None:
        Experts.__init__(self, args, args.moe_intermediate_size)
        self.expert_bias = mx.zeros(args.num_experts)
        self.shared_experts = MLP(args.hidden_size, args.shared_expert_intermediate_size)

    def __call__(self, x: mx.array) -> mx.array:
        """Returns the output [B, L, D] for `x` [B, L, D]."""
        logits = self.gate(x.astype(mx.float32))
        keys = -logits + -self.expert_bias  # a sum with `logits` themselves would multiply by packed weights once more
        chosen = mx.argpartition(keys, kth=self.most - 1, axis=-1)[..., : self.most]
        weights = mx.sigmoid(mx.take_along_axis(logits, chosen, axis=-1))
        if self.normalizes:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return self.mix(x, chosen, weights)


class KolibriBlock(Module):
    """One layer: attention, then experts."""

    def __init__(self, args: ModelArgs, *, slides: bool) -> None:
        Module.__init__(self)
        self.self_attn = Attention(cast("Any", args), is_local=slides)  # local means: with a window and a rotation
        self.mlp = KolibriExperts(args)
        self.input_layernorm, self.post_attn_norm, self.post_attention_layernorm, self.post_ffn_norm = (
            RMSNorm(args.hidden_size, args.rms_norm_eps) for _ in range(4)
        )

    def __call__(self, x: mx.array, mask: Mask, cache: Any) -> mx.array:
        """Returns the output [B, L, D] for `x` [B, L, D]."""
        x = x + self.post_attn_norm(self.self_attn(self.input_layernorm(x), mask, cache))
        return cast("mx.array", x + self.post_ffn_norm(self.mlp(self.post_attention_layernorm(x))))


class Model(DecoderModel):
    """The model, with the methods that mlx-lm expects."""

    args: ModelArgs

    def __init__(self, args: ModelArgs) -> None:
        layers = (KolibriBlock(args, slides=slides) for slides in args.windows)
        DecoderModel.__init__(self, args, layers, RMSNorm(args.hidden_size, args.rms_norm_eps))

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Returns the logits [B, L, V] of the tokens `inputs` [B, L], which follow the tokens in `cache`. Adds the keys
        and values of `inputs` to `cache`, if there is one."""
        hidden = self.model(inputs, cache)
        if self.args.head_dtype == "float32":
            hidden = hidden.astype(mx.float32)
        return self.head(hidden)

    def cast_predicate(self, name: str) -> bool:
        """Returns True if the parameter `name` may lose precision; False if the forward computes with it in float32."""
        wide = (
            "mlp.gate.weight",
            "mlp.expert_bias",
            *(["lm_head.weight"] if self.args.head_dtype == "float32" else []),
        )
        return not name.endswith(wide)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Returns `weights` by this module's names. Stacks separate experts. Converts parameters that must not lose
        precision to float32."""
        named = {_BIAS.sub(".mlp.expert_bias", name): array for name, array in weights.items()}
        named = DecoderModel.sanitize(self, named)
        for name, array in named.items():
            if not self.cast_predicate(name) and mx.issubdtype(array.dtype, mx.floating):
                named[name] = array.astype(mx.float32)  # otherwise every forward would convert it
        return named
