"""The parts that the decoders in `runner/model/modules` share: layers with and without a sliding window, experts, and
the split over ranks."""

from collections.abc import Iterable
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx_lm.models.base import BaseModelArgs, create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.switch_layers import SwitchGLU

Mask = Any
"""An attention mask in mlx-lm's form: an array, "causal", or None if nothing is masked."""
SLIDING, FULL = "sliding_attention", "full_attention"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class DecoderArgs(BaseModelArgs):
    """The config fields that the classes in this file read. A subclass must be a data class with all these fields."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    sliding_window: int
    layer_types: list[str] | None
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    tie_word_embeddings: bool

    @property
    def windows(self) -> list[bool]:
        """One entry for each layer: True if the layer has a sliding window."""
        return [kind == SLIDING for kind in self.layer_types or ()]

    def check_layers(self, field: str, *known: str) -> None:
        """Raises ValueError unless the list `field` has one entry for each layer, and every entry is one of `known`."""
        kinds: list[str] = getattr(self, field)
        if len(kinds) != self.num_hidden_layers:
            raise ValueError(f"{field} has {len(kinds)} entries, want {self.num_hidden_layers}")
        if odd := [kind for kind in kinds if kind not in known]:
            raise ValueError(f"unsupported {field}: {odd[0]!r}")

    def check_experts(self) -> None:
        """Raises ValueError if `num_experts_per_tok` exceeds `num_experts`."""
        if (chosen := self.num_experts_per_tok) > self.num_experts:
            raise ValueError(f"num_experts_per_tok ({chosen}) exceeds num_experts ({self.num_experts})")


class Experts(Module):
    """A layer of experts. A subclass chooses a few experts for each token, and may set `shared_experts`, which compute
    every token."""

    def __init__(self, args: DecoderArgs, width: int, *, averages: bool = False) -> None:
        Module.__init__(self)  # MLX's __init__ is not typed
        self.gate = Linear(args.hidden_size, args.num_experts, bias=False)
        self.switch_mlp = SwitchGLU(args.hidden_size, width, args.num_experts)
        self.most = args.num_experts_per_tok
        self.normalizes = args.norm_topk_prob
        self.averages = averages
        self.sharding_group: mx.distributed.Group | None = None

    def mix(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """Returns the sum [B, L, D] of the outputs for `x` [B, L, D] of the experts `chosen` for each token, times
        `weights` (both [B, L, K]), and of the output of the shared experts."""
        rows = self.switch_mlp(x, chosen)
        mixed: mx.array = (rows * weights[..., None]).sum(axis=-2).astype(rows.dtype)
        if "shared_experts" in self:
            mixed = mixed + self.shared_experts(x)
            mixed = mixed / 2 if self.averages else mixed
        return mixed if self.sharding_group is None else mx.distributed.all_sum(mixed, group=self.sharding_group)


class Decoder(Module):
    """The part of a model from tokens to the hidden states after the last norm. Every layer must have its attention in
    `self_attn`, and a feed-forward or experts in `mlp`."""

    def __init__(self, args: DecoderArgs, layers: Iterable[Module], norm: Module) -> None:
        Module.__init__(self)
        self.embed_tokens = Embedding(args.vocab_size, args.hidden_size)
        self.layers = [*layers]
        self.norm = norm
        self.windows = args.windows
        self.window = args.sliding_window

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Returns the hidden states [B, L, D] of the tokens [B, L]."""
        hidden = self.embed_tokens(inputs)
        caches: list[Any] = cache or [None] * len(self.layers)
        masks: dict[bool, Mask] = {}
        for sliding, each in zip(self.windows, caches, strict=True):
            if sliding not in masks:  # the caches of all layers of a kind have one offset
                masks[sliding] = create_attention_mask(hidden, each, window_size=self.window if sliding else None)
        for layer, sliding, each in zip(self.layers, self.windows, caches, strict=True):
            hidden = layer(hidden, masks[sliding], each)
        return cast("mx.array", self.norm(hidden))


class DecoderModel(Module):
    """A model with the methods that mlx-lm expects, except `__call__`. A subclass computes the logits in `__call__`."""

    def __init__(self, args: DecoderArgs, layers: Iterable[Module], norm: Module) -> None:
        Module.__init__(self)
        self.args = args
        self.model_type = args.model_type
        self.model = Decoder(args, layers, norm)
        if not args.tie_word_embeddings:
            self.lm_head = Linear(args.hidden_size, args.vocab_size, bias=False)

    def head(self, hidden: mx.array) -> mx.array:
        """Returns the output projection [B, L, V] of the hidden states [B, L, D]."""
        head = self.model.embed_tokens.as_linear if "lm_head" not in self else self.lm_head
        return cast("mx.array", head(hidden))

    @property
    def layers(self) -> list[Module]:
        """The layers, in the order of computing."""
        return self.model.layers

    def make_cache(self) -> list[KVCache | RotatingKVCache]:
        """Returns fresh layer caches for one sequence."""
        window = self.args.sliding_window
        return [RotatingKVCache(max_size=window, keep=0) if slides else KVCache() for slides in self.args.windows]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Returns `weights` by this module's names. Stacks separate experts, and drops the head of a tied model."""
        named = dict(weights)
        if self.args.tie_word_embeddings:
            named.pop("lm_head.weight", None)
        for name in [name for name in named if ".mlp.experts.0." in name]:
            parts = [name.replace(".experts.0.", f".experts.{expert}.") for expert in range(self.args.num_experts)]
            named[name.replace(".experts.0.", ".switch_mlp.")] = mx.stack([named.pop(part) for part in parts])
        return named

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """Keeps only the parts that this rank computes: some heads, and a part of the width of every feed-forward."""
        group = group or mx.distributed.init()
        ways = [(name, "sharded-to-all" if name == "down_proj" else "all-to-sharded") for name in _PROJECTIONS]
        for layer in self.layers:
            attention, feed = layer["self_attn"], layer["mlp"]
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                way = "sharded-to-all" if name == "o_proj" else "all-to-sharded"
                attention[name] = shard_linear(attention[name], way, group=group)
            attention.n_heads //= group.size()
            attention.n_kv_heads //= group.size()
            if "switch_mlp" not in feed:
                for name, way in ways:
                    feed[name] = shard_linear(feed[name], way, group=group)
                continue
            feed.sharding_group = group
            for part in ("switch_mlp", "shared_experts"):
                for name, way in ways if part in feed else ():
                    shard_inplace(feed[part][name], way, group=group)
