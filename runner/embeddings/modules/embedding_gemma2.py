"""The text encoder of EmbeddingGemma 2 (`EmbeddingGemma2Model`): tokens to one vector for each text.

Every token sees the tokens on both sides, in most layers only near tokens. So there is no cache, and each layer needs
the whole text. `encode` yields after each block of queries of a layer, so that other requests have turns.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import pi
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.base import BaseModelArgs

from runner.embeddings.embedder import EncoderPiece
from runner.model.renamed import layer_overrides

_SLIDING, _FULL = "sliding_attention", "full_attention"
_SCORES = 1 << 22
"""The most attention scores of one head in a block of queries: 64 MB for four heads in float32."""
_LEAST_NORM = 1e-12
_GELU = (2 / pi) ** 0.5


@partial(mx.compile, shapeless=True)
def _gelu(x: mx.array) -> mx.array:
    """Returns the tanh approximation of GELU. MLX's own uses `power`, which takes a sixth of a forward on CPUs."""
    return 0.5 * x * (1 + mx.tanh(_GELU * (x + 0.044715 * (x * x * x))))


@dataclass
class ModelArgs(BaseModelArgs):
    """The fields of a config.json's `text_config`, with the defaults of the package transformers."""

    model_type: str
    vocab_size: int = 262144
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 24
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 256
    hidden_size_per_layer_input: int = 512
    embedding_dim: int = 768
    rms_norm_eps: float = 1e-6
    sliding_window: int = 512
    """The number of tokens that a token sees on each side in a sliding layer."""
    attention_bias: bool = False
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    per_layer_config: dict[str, Any] | None = None
    """Number of a layer -> fields whose values differ in that layer."""
    vocab_size_per_layer_input: int = 0

    def __post_init__(self) -> None:
        """Fills `layer_types` and `per_layer_config`. Raises ValueError for invalid values and unsupported ones."""
        layers = self.num_hidden_layers
        if self.vocab_size_per_layer_input > 0:
            raise ValueError(
                "vocab_size_per_layer_input > 0 (token-identity PLE) is not implemented; got"
                f" {self.vocab_size_per_layer_input}"
            )
        for kind, rope in (self.rope_parameters or {}).items():
            if isinstance(rope, Mapping) and rope.get("rope_type", "default") != "default":
                raise ValueError(f'unsupported rope_type "{rope["rope_type"]}" for {kind}')
        if self.layer_types is None:
            self.layer_types = [_SLIDING if (layer + 1) % 6 else _FULL for layer in range(layers)]
        if len(self.layer_types) != layers or not {_SLIDING, _FULL}.issuperset(self.layer_types):
            raise ValueError(f"layer_types must be {layers} of {_SLIDING} or {_FULL}, found {self.layer_types}")
        self.layer_types = [*self.layer_types[:-1], _FULL]
        if self.per_layer_config is None:
            full = [layer for layer, kind in enumerate(self.layer_types) if kind == _FULL]
            self.per_layer_config = {str(layer): {"head_dim": 512, "num_key_value_heads": 1} for layer in full}

    def of_layer(self, layer: int) -> "LayerArgs":
        """Returns the sizes of the attention of one layer."""
        own = cast("Mapping[str, int]", layer_overrides(vars(self)).get(layer, {}))
        slides = self.layer_types is not None and self.layer_types[layer] == _SLIDING
        return LayerArgs(
            heads=own.get("num_attention_heads", self.num_attention_heads),
            key_heads=own.get("num_key_value_heads", self.num_key_value_heads),
            width=own.get("head_dim", self.head_dim),
            reach=self.sliding_window if slides else None,
            theta=self.rope_local_base_freq if slides else self.rope_theta,
        )


class LayerArgs(NamedTuple):
    """The sizes of the attention of one layer."""

    heads: int
    key_heads: int
    width: int
    """The width of a head."""
    reach: int | None
    """The number of tokens that a token sees on each side. None for all tokens."""
    theta: float


class TwoSidedAttention(Module):
    """Attention to the tokens on both sides. Scores are not scaled. Values are normalized, as queries and keys are."""

    def __init__(self, args: ModelArgs, layer: LayerArgs) -> None:
        Module.__init__(self)  # by name, since `super().__init__` of MLX has no types
        self.q_proj = Linear(args.hidden_size, layer.heads * layer.width, bias=args.attention_bias)
        self.k_proj = Linear(args.hidden_size, layer.key_heads * layer.width, bias=args.attention_bias)
        self.v_proj = Linear(args.hidden_size, layer.key_heads * layer.width, bias=args.attention_bias)
        self.o_proj = Linear(layer.heads * layer.width, args.hidden_size, bias=args.attention_bias)
        self.q_norm = RMSNorm(layer.width, args.rms_norm_eps)
        self.k_norm = RMSNorm(layer.width, args.rms_norm_eps)
        self._eps = args.rms_norm_eps
        self._layer = layer

    def keys_values(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the keys and values [B, H, L, W] for all positions of `x` [B, L, D]."""
        values = mx.fast.rms_norm(self._split(self.v_proj(x)), None, self._eps)
        return self._turned(self.k_norm(self._split(self.k_proj(x))), 0), values.swapaxes(1, 2)

    def __call__(self, x: mx.array, keys: mx.array, values: mx.array, start: int, mask: mx.array | None) -> mx.array:
        """Returns the attention's output for `x` [B, T, D], the inputs at T positions from `start` on."""
        queries = self._turned(self.q_norm(self._split(self.q_proj(x))), start)
        seen = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask)
        return self.o_proj(seen.swapaxes(1, 2).flatten(2))

    def _split(self, projected: mx.array) -> mx.array:
        """Splits the last axis into heads: returns [B, L, H, W] for [B, L, H W]."""
        return mx.unflatten(projected, -1, (-1, self._layer.width))

    def _turned(self, heads: mx.array, start: int) -> mx.array:
        """Applies rotary positions from `start` on. Returns [B, H, L, W] for [B, L, H, W]."""
        width, theta = self._layer.width, self._layer.theta
        return mx.fast.rope(heads.swapaxes(1, 2), width, traditional=False, base=theta, scale=1.0, offset=start)


class EncoderFeedForward(Module):
    """The feed-forward network of a layer, gated by GELU."""

    def __init__(self, args: ModelArgs) -> None:
        Module.__init__(self)
        self.gate_proj = Linear(args.hidden_size, args.intermediate_size, bias=False)
        self.up_proj = Linear(args.hidden_size, args.intermediate_size, bias=False)
        self.down_proj = Linear(args.intermediate_size, args.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(_gelu(self.gate_proj(x)) * self.up_proj(x))


class LayerInput(Module):
    """The second input of a layer, computed from the embeddings of the tokens."""

    def __init__(self, args: ModelArgs) -> None:
        Module.__init__(self)
        width = args.hidden_size_per_layer_input
        self.per_layer_model_projection = Linear(args.hidden_size, width, bias=False)
        self.per_layer_input_gate = Linear(args.hidden_size, width, bias=False)
        self.per_layer_projection = Linear(width, args.hidden_size, bias=False)
        self.post_per_layer_input_norm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self._scale = args.hidden_size**-0.5

    def __call__(self, x: mx.array, embedded: mx.array, norm: Module) -> mx.array:
        """Returns the array to add to `x` [B, T, D]. `embedded` [B, T, D] is the embeddings of the same tokens."""
        own = cast("mx.array", norm(self.per_layer_model_projection(embedded) * self._scale))
        gated = _gelu(self.per_layer_input_gate(x)) * own
        return cast("mx.array", self.post_per_layer_input_norm(self.per_layer_projection(gated)))


class EncoderLayer(Module):
    def __init__(self, args: ModelArgs, number: int) -> None:
        Module.__init__(self)
        layer = args.of_layer(number)
        self.self_attn = TwoSidedAttention(args, layer)
        self.mlp = EncoderFeedForward(args)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            self[f"{name}_layernorm"] = RMSNorm(args.hidden_size, args.rms_norm_eps)
        if args.hidden_size_per_layer_input:
            self.ple_block = LayerInput(args)
        self.layer_scalar = mx.ones((1,))
        self.reach = layer.reach
        matrices = args.hidden_size * (
            2 * (layer.heads + layer.key_heads) * layer.width
            + 3 * (args.intermediate_size + args.hidden_size_per_layer_input)
        )
        self._key_work = 2 * layer.heads * layer.width / matrices

    def blocks(
        self, x: mx.array, embedded: mx.array, valid: mx.array | None, norm: Module | None
    ) -> Iterator[EncoderPiece]:
        """Yields a piece for each block of positions, in order. The last array of a piece is the layer's output there.

        `x` and `embedded` are [B, L, D]. `valid` is bool [B, L], False for padding, or None if there is no padding.
        """
        batch, length, _ = x.shape
        normed = cast("mx.array", self["input_layernorm"](x))
        keys, values = self.self_attn.keys_values(normed)
        size = max(1, min(length, _SCORES // (batch * length)))
        for start in range(0, length, size):
            stop = min(start + size, length)
            first, last = 0, length
            if self.reach is not None:
                first, last = max(0, start - self.reach), min(length, stop + self.reach)
            mask = self._mask(start, stop, first, last, valid)
            seen = self.self_attn(normed[:, start:stop], keys[:, :, first:last], values[:, :, first:last], start, mask)
            rows = x[:, start:stop] + self["post_attention_layernorm"](seen)
            rows = rows + self["post_feedforward_layernorm"](self.mlp(self["pre_feedforward_layernorm"](rows)))
            if norm is not None:
                rows = rows + self.ple_block(rows, embedded[:, start:stop], norm)
            work = batch * (stop - start) * (1 + self._key_work * (last - first))
            yield EncoderPiece([keys, values, rows * self.layer_scalar], work)

    def _mask(self, start: int, stop: int, first: int, last: int, valid: mx.array | None) -> mx.array | None:
        """Returns a bool mask, True where a query in [start, stop) sees a key in [first, last). None if all do."""
        if self.reach is None or max(stop - 1 - first, last - 1 - start) <= self.reach:
            return None if valid is None else valid[:, None, None, first:last]
        rows, keys = mx.arange(start, stop)[:, None], mx.arange(first, last)
        near = mx.abs(rows - keys) <= self.reach
        if valid is None:
            return near
        # Padding sees itself, since the output of a query that sees no key would be NaN.
        return mx.logical_or(mx.logical_and(near, valid[:, None, None, first:last]), rows == keys)


class Inputs(Module):
    """The norm that all `LayerInput`s share."""

    def __init__(self, args: ModelArgs) -> None:
        Module.__init__(self)
        self.per_layer_projection_norm = RMSNorm(args.hidden_size_per_layer_input, args.rms_norm_eps)


class Model(Module):
    """The encoder, with the attributes of mlx-lm's models. It has no cache and no logits."""

    def __init__(self, args: ModelArgs) -> None:
        Module.__init__(self)
        self.args = args
        self.model_type = args.model_type
        self.embed_tokens = Embedding(args.vocab_size, args.hidden_size)
        self.layers = [EncoderLayer(args, number) for number in range(args.num_hidden_layers)]
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.embedding_projection = Linear(args.hidden_size, args.embedding_dim, bias=False)
        if args.hidden_size_per_layer_input:
            self.ple = Inputs(args)

    def __call__(self, inputs: mx.array, cache: object = None) -> mx.array:
        """Returns the embeddings [B, D] of texts of equal lengths. `inputs` are tokens [B, L]."""
        del cache
        return self.finished(self.encode(inputs, [inputs.shape[1]] * inputs.shape[0]))

    @staticmethod
    def finished(pieces: Iterator[EncoderPiece]) -> mx.array:
        """Returns the embeddings, the array in the last of the pieces that `encode` yields."""
        *_, last = pieces
        return last.arrays[0]

    def encode(
        self, inputs: mx.array, lengths: Sequence[int], media: Sequence[tuple[int, int, int, mx.array]] = ()
    ) -> Iterator[EncoderPiece]:
        """Builds a forward over tokens [B, L] and yields it in pieces, not evaluated. The last piece has the embeddings
        float32 [B, D], of length 1. Row b has padding after `lengths[b]` tokens.

        `media` are (row, start, stop, features [stop - start, D]) of pictures and sounds.
        """
        length = inputs.shape[1]
        valid = mx.arange(length) < mx.array([*lengths])[:, None] if min(lengths) < length else None
        embedded = self.embed_tokens(inputs)
        embedded = embedded * mx.array(self.args.hidden_size**0.5, embedded.dtype)
        for row, start, stop, features in media:
            embedded[row, start:stop] = features.astype(embedded.dtype)
        x = embedded
        norm = self.ple.per_layer_projection_norm if "ple" in self else None
        for layer in self.layers:
            blocks = []
            for piece in layer.blocks(x, embedded, valid, norm):
                blocks.append(piece.arrays[-1])
                yield piece
            x = mx.concatenate(blocks, axis=1) if len(blocks) > 1 else blocks[0]
        yield EncoderPiece([self._pooled(x, lengths, valid)], 0.0)

    def _pooled(self, x: mx.array, lengths: Sequence[int], valid: mx.array | None) -> mx.array:
        """Returns the mean vector of each text's tokens, scaled to length 1."""
        rows = self.embedding_projection(cast("mx.array", self.norm(x))).astype(mx.float32)
        if valid is not None:
            rows = mx.where(valid[..., None], rows, 0.0)
        means = rows.sum(axis=1) / mx.array([*lengths], mx.float32)[:, None]
        return means / mx.maximum(mx.linalg.norm(means, axis=-1, keepdims=True), _LEAST_NORM)

    def make_cache(self) -> list[object]:
        """Returns no layer caches."""
        return []

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Returns the weights under this module's names. Splits the projection for all layers' inputs, so that each
        layer can compute its own input."""
        named = {}
        for name, array in weights.items():
            if name.removeprefix("ple.") == "per_layer_model_projection.weight":
                for number, part in enumerate(mx.split(array, self.args.num_hidden_layers)):
                    named[f"layers.{number}.ple_block.per_layer_model_projection.weight"] = part
            else:
                named[name] = array
        return named
