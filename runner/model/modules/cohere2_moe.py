"""Cohere's decoder with experts (`Cohere2MoeForCausalLM`), built from mlx-lm's parts.

The attention and the feed-forward of a block both read the output of one norm, and the block adds their results. Most
layers have a sliding window and rotary positions; the other layers see all tokens, without positions. The first layers
may be dense, which means without experts.
"""

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cohere2 import MLP

from runner.model.decoder import FULL, SLIDING, DecoderArgs, DecoderModel, Experts, Mask

_DENSE, _SPARSE = "dense", "sparse"


@dataclass
class ModelArgs(DecoderArgs):
    """The fields of `config.json`, with the defaults of transformers."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int = 256000
    rope_theta: float = 10000.0
    layer_norm_eps: float = 1e-5
    rms_norm_eps: float | None = None
    """Present if the norms are RMS norms."""
    logit_scale: float = 0.0625
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    sliding_window: int = 4096
    sliding_window_pattern: int = 4
    """A layer whose number is a multiple of this sees all tokens. The first layer that is not dense has number 1."""
    layer_types: list[str] | None = None
    num_experts: int = 8
    num_experts_per_tok: int = 2
    expert_selection_fn: str = "softmax"
    norm_topk_prob: bool = True
    num_shared_experts: int = 0
    shared_expert_combination_strategy: str = "average"
    first_k_dense_replace: int = 0
    """The number of dense layers at the beginning."""
    mlp_layer_types: list[str] | None = None
    prefix_dense_intermediate_size: int | None = None
    prefix_dense_sliding_window_pattern: int = 1
    """The pattern of the dense layers, counted from 1. If it is 1, they see all tokens and have rotary positions."""

    def __post_init__(self) -> None:
        """Fills in missing fields from other fields. Raises ValueError for contradictions and unknown values."""
        dense, layers = self.first_k_dense_replace, self.num_hidden_layers
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.prefix_dense_intermediate_size is None:
            self.prefix_dense_intermediate_size = self.intermediate_size
        if self.mlp_layer_types is None:
            self.mlp_layer_types = [_DENSE if layer < dense else _SPARSE for layer in range(layers)]
        if self.layer_types is None:
            patterns = [
                (layer + 1, self.prefix_dense_sliding_window_pattern)
                if layer < dense
                else (layer - dense + 1, self.sliding_window_pattern)
                for layer in range(layers)
            ]
            self.layer_types = [SLIDING if place % pattern else FULL for place, pattern in patterns]
        self.check_layers("layer_types", SLIDING, FULL)
        self.check_layers("mlp_layer_types", _DENSE, _SPARSE)
        self.check_experts()
        for name, known in (
            ("expert_selection_fn", ("softmax", "sigmoid")),
            ("shared_expert_combination_strategy", ("average", "sum")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f'unsupported {name}: "{getattr(self, name)}"')

    def make_norm(self) -> Module:
        """Returns a fresh norm for hidden states."""
        if self.rms_norm_eps is not None:
            return RMSNorm(self.hidden_size, self.rms_norm_eps)
        return LayerNorm(self.hidden_size, self.layer_norm_eps, bias=False)


class CohereAttention(Module):
    """Attention that does not normalize its queries and keys."""

    def __init__(self, args: ModelArgs, layer: int) -> None:
        Module.__init__(self)  # MLX's __init__ is not typed
        width = cast("int", args.head_dim)
        self.n_heads, self.n_kv_heads = args.num_attention_heads, cast("int", args.num_key_value_heads)
        self.scale = width**-0.5
        self.q_proj = Linear(args.hidden_size, self.n_heads * width, bias=args.attention_bias)
        self.k_proj = Linear(args.hidden_size, self.n_kv_heads * width, bias=args.attention_bias)
        self.v_proj = Linear(args.hidden_size, self.n_kv_heads * width, bias=args.attention_bias)
        self.o_proj = Linear(self.n_heads * width, args.hidden_size, bias=args.attention_bias)
        dense = args.mlp_layer_types is not None and args.mlp_layer_types[layer] == _DENSE
        self.turns = args.windows[layer] or (dense and args.prefix_dense_sliding_window_pattern == 1)
        self.rope = RoPE(width, traditional=True, base=args.rope_theta)

    def __call__(self, x: mx.array, mask: Mask, cache: Any) -> mx.array:
        """Returns the output [B, L, D] for `x` [B, L, D]. Adds the keys and values of `x` to `cache`, if there is
        one."""
        queries = self._split(self.q_proj(x), self.n_heads)
        keys, values = (self._split(part(x), self.n_kv_heads) for part in (self.k_proj, self.v_proj))
        if self.turns:
            offset = 0 if cache is None else cache.offset
            queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        # Queries and keys are not normalized, so their products may leave the range of float16.
        wide = mx.float32 if queries.dtype == mx.float16 else queries.dtype
        queries = queries.astype(wide)
        seen = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(seen.astype(x.dtype).swapaxes(1, 2).flatten(2))

    @staticmethod
    def _split(projected: mx.array, heads: int) -> mx.array:
        """Returns `projected` [B, L, H W] split into heads, [B, H, L, W]."""
        # Unlike `unflatten`, this raises an error for zero heads: a trial may split a model over too many ranks.
        return projected.reshape(*projected.shape[:2], heads, -1).swapaxes(1, 2)


class CohereExperts(Experts):
    """A layer of experts: a few chosen ones for each token, and perhaps some that all tokens share."""

    def __init__(self, args: ModelArgs) -> None:
        averages = args.shared_expert_combination_strategy == "average"
        Experts.__init__(self, args, args.intermediate_size, averages=averages)
        if args.num_shared_experts:
            self.shared_experts = MLP(args.hidden_size, args.intermediate_size * args.num_shared_experts)
        self.softmax = args.expert_selection_fn == "softmax"

    def __call__(self, x: mx.array) -> mx.array:
        """Returns the output [B, L, D] for `x` [B, L, D]."""
        logits = self.gate(x).astype(mx.float32)
        chosen = mx.argpartition(-logits, kth=self.most - 1, axis=-1)[..., : self.most]
        logits = mx.take_along_axis(logits, chosen, axis=-1)
        weights = mx.softmax(logits, axis=-1) if self.softmax else mx.sigmoid(logits)
        if self.normalizes and self.most > 1 and not self.softmax:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return self.mix(x, chosen, weights)


class CohereBlock(Module):
    """One layer: attention, and beside it experts or a dense feed-forward."""

    def __init__(self, args: ModelArgs, layer: int) -> None:
        Module.__init__(self)
        self.self_attn = CohereAttention(args, layer)
        dense = args.mlp_layer_types is not None and args.mlp_layer_types[layer] == _DENSE
        self.mlp = MLP(args.hidden_size, args.prefix_dense_intermediate_size) if dense else CohereExperts(args)
        self.input_layernorm = args.make_norm()

    def __call__(self, x: mx.array, mask: Mask, cache: Any) -> mx.array:
        """Returns the output [B, L, D] for `x` [B, L, D]."""
        normed = cast("mx.array", self.input_layernorm(x))
        return x + self.self_attn(normed, mask, cache) + cast("mx.array", self.mlp(normed))


class Model(DecoderModel):
    """The model, with the methods that mlx-lm expects."""

    args: ModelArgs

    def __init__(self, args: ModelArgs) -> None:
        layers = (CohereBlock(args, layer) for layer in range(args.num_hidden_layers))
        DecoderModel.__init__(self, args, layers, args.make_norm())

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Returns the logits [B, L, V] of the tokens `inputs` [B, L], which follow the tokens in `cache`. Adds the keys
        and values of `inputs` to `cache`, if there is one."""
        return self.head(self.model(inputs, cache)) * self.args.logit_scale

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Returns `weights` by this module's names. Stacks separate experts, and drops the head of a tied model."""
        named = {name.replace(".mlp.shared_expert.", ".mlp.shared_experts."): each for name, each in weights.items()}
        return DecoderModel.sanitize(self, named)
