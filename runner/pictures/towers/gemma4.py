"""Gemma 4's tower: that of e2b, e4b, 26B-A4B and 31B."""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from functools import partial
from typing import Self

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm

from runner.errors import ModelError
from runner.pictures.towers.block import (
    embedding_bytes,
    rotary_angles,
    summed_rows,
    transformer_bytes,
    turned,
    work_bytes,
)
from runner.pictures.towers.fields import few, flag, kind_of, only, part_of, real, rope_theta, size, text_width
from runner.pictures.towers.tower import Grid, Layer, Steps, Tower, attend, in_pieces

# --- A linear that keeps its input and output within bounds, as some towers of Gemma 4 have them.

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class ClampedLinear(Layer):
    """A linear without a bias. If `clamped`, its input and output are kept within bounds."""

    def __init__(self, inputs: int, outputs: int, clamped: bool) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs, bias=False)
        if clamped:
            self.input_min = self.output_min = mx.array(-mx.inf)
            self.input_max = self.output_max = mx.array(mx.inf)

    def __call__(self, x: mx.array) -> mx.array:
        if "input_min" not in self:
            return self.linear(x)
        # A bound of another type would change that of the whole array.
        low, high, least, most = (mx.array(self[name], x.dtype) for name in BOUNDS)
        return mx.clip(self.linear(mx.clip(x, low, high)), least, most)

    def free(self) -> None:
        """Takes the bounds away."""
        for name in BOUNDS:
            self.pop(name, None)


_TABLE = "patch_embedder.position_embedding_table"


class PatchEmbedder(Layer):
    """Pixels and positions to rows."""

    def __init__(self, values: int, positions: int, hidden: int) -> None:
        super().__init__()
        self.input_proj = Linear(values, hidden, bias=False)
        self.position_embedding_table = mx.ones((2, positions, hidden))  # columns, rows

    def __call__(self, patches: mx.array, grid: Grid) -> mx.array:
        columns, rows = self.position_embedding_table
        pixels = 2 * (patches.astype(mx.float32) / 255 - 0.5)
        return self.input_proj(pixels.astype(columns.dtype)) + summed_rows(columns, rows, grid)


class Attention(Layer):
    """Of every patch to every patch; the norms of queries and keys take the place of a scale."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head: int, eps: float, clamped: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head, self.eps = heads, kv_heads, head, eps
        self.q_proj = ClampedLinear(hidden, heads * head, clamped)
        self.k_proj = ClampedLinear(hidden, kv_heads * head, clamped)
        self.v_proj = ClampedLinear(hidden, kv_heads * head, clamped)
        self.o_proj = ClampedLinear(heads * head, hidden, clamped)
        self.q_norm = RMSNorm(head, eps)
        self.k_norm = RMSNorm(head, eps)

    def steps(self, x: mx.array, angles: mx.array, piece_bytes: int) -> Steps:
        """Attends within `x` [patches, hidden]; `angles` is [patches, 2, head / 4]."""
        heads = self.heads + 2 * self.kv_heads
        row_bytes = heads * self.head * 4
        joined = yield from in_pieces(partial(self._projected, x, angles), len(x), row_bytes, piece_bytes, axis=1)
        queries, keys, values = mx.split(joined[None], [self.heads, self.heads + self.kv_heads], axis=1)
        attended = yield from attend(queries, keys, values, 1.0, piece_bytes)
        del joined, queries, keys, values  # else they would stay in memory to the end
        return (yield from in_pieces(partial(self._left, attended), len(x), row_bytes, piece_bytes))

    def _projected(self, x: mx.array, angles: mx.array, rows: slice) -> mx.array:
        """Returns queries, keys and values [heads + 2 kv_heads, rows, head]."""
        x, angles = x[rows], angles[rows]
        queries = self._turned(self.q_norm(self.q_proj(x).reshape(-1, self.heads, self.head)), angles)
        keys = self._turned(self.k_norm(self.k_proj(x).reshape(-1, self.kv_heads, self.head)), angles)
        values = mx.fast.rms_norm(self.v_proj(x).reshape(-1, self.kv_heads, self.head), None, self.eps)
        return mx.concatenate([queries, keys, values], axis=1).swapaxes(0, 1)

    def _left(self, attended: mx.array, rows: slice) -> mx.array:
        """Returns the output [rows, hidden] for what was attended to, [1, heads, patches, head]."""
        return self.o_proj(attended[0, :, rows].swapaxes(0, 1).flatten(1))

    @staticmethod
    def _turned(x: mx.array, angles: mx.array) -> mx.array:
        """Turns the first half of each head with the column, the other with the row, each as two halves of its own."""
        parts = x.reshape(*x.shape[:2], 2, 2, -1)
        return turned(parts, angles[:, None], axis=3).reshape(x.shape)


class FeedForward(Layer):
    """A gated one."""

    def __init__(self, hidden: int, inner: int, clamped: bool) -> None:
        super().__init__()
        self.gate_proj = ClampedLinear(hidden, inner, clamped)
        self.up_proj = ClampedLinear(hidden, inner, clamped)
        self.down_proj = ClampedLinear(inner, hidden, clamped)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class Block(Layer):
    """Attention and feed-forward, each with a norm before and behind it."""

    def __init__(self, attention: Attention, mlp: FeedForward, hidden: int, inner: int) -> None:
        super().__init__()
        self.inner = inner
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = RMSNorm(hidden, attention.eps)
        self.post_attention_layernorm = RMSNorm(hidden, attention.eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, attention.eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, attention.eps)

    def steps(self, x: mx.array, angles: mx.array, piece_bytes: int) -> Steps:
        """Returns `x` [patches, hidden], gone through the layer."""
        found = yield from self.self_attn.steps(self.input_layernorm(x), angles, piece_bytes)
        x = x + self.post_attention_layernorm(found)
        return (yield from in_pieces(partial(self._fed, x), len(x), self.inner * x.itemsize, piece_bytes))

    def free_but(self, bounded: Container[str], name: str) -> None:
        """Takes the bounds of the linears away whose names are not in `bounded`; `name` is that of this block."""
        for part in ("self_attn", "mlp"):
            for key, module in self[part].items():
                if isinstance(module, ClampedLinear) and f"{name}.{part}.{key}" not in bounded:
                    module.free()

    def _fed(self, x: mx.array, rows: slice) -> mx.array:
        found: mx.array = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x[rows])))
        return x[rows] + found


class Encoder(Layer):
    """Holds the layers, for their names."""

    def __init__(self, layers: list[Block]) -> None:
        super().__init__()
        self.layers = layers


class Gemma4Tower(Tower):
    """A transformer over 16 px patches. `patches` [count, 16 * 16 * 3] are row-major, each y, x, channel.

    A soft token is the mean of 3 x 3 patches, so a grid's rows and columns are multiples of 3. Source:
    huggingface/transformers, models/gemma4.
    """

    names = (
        (
            r"(?:model\.)?vision_tower\.(encoder\.layers\.\d+\.\w+\.\w+_proj)\.(?=weight$|scales$|biases$)",
            r"\1.linear.",
        ),
        (r"(?:model\.)?vision_tower\.(?!.*rotary_emb\.)", ""),
        (r"(?:model\.)?embed_vision\.", ""),
    )

    def __init__(self, vision: Mapping[str, object], width: int) -> None:
        super().__init__()
        hidden, inner = size(vision, "hidden_size", 768), size(vision, "intermediate_size", 3072)
        heads = size(vision, "num_attention_heads", 12)
        kv_heads, head = size(vision, "num_key_value_heads", heads), size(vision, "head_dim", 64)
        if head % 4:  # two directions, two halves each
            raise ModelError(f"config.json: a vision tower's head_dim must be a multiple of 4, found {head}")
        if heads % kv_heads:
            raise ModelError(f"config.json: a vision tower's {kv_heads} heads for keys must divide {heads}")
        only(vision, "hidden_activation", "gelu_pytorch_tanh")
        self.width, self.hidden, self.heads, self.head = width, hidden, heads, head
        self.clamped = flag(vision, "use_clipped_linears")
        self.eps, self.theta = real(vision, "rms_norm_eps", 1e-6), rope_theta(vision, 100.0)
        self.pool = few(vision, "pooling_kernel_size", 3)
        self.inner = inner
        # Not `values`: that is a method of MLX's modules, which are dicts.
        self.pixels = 3 * few(vision, "patch_size", 16) ** 2
        self.patch_embedder = PatchEmbedder(self.pixels, size(vision, "position_embedding_size", 10240), hidden)
        blocks = [
            Block(
                Attention(hidden, heads, kv_heads, head, self.eps, self.clamped),
                FeedForward(hidden, inner, self.clamped),
                hidden,
                inner,
            )
            for _ in range(few(vision, "num_hidden_layers", 16))
        ]
        self.encoder = Encoder(blocks)
        if flag(vision, "standardize"):
            self.std_bias, self.std_scale = mx.zeros((hidden,)), mx.ones((hidden,))
        self.embedding_projection = Linear(hidden, width, bias=False)

    @classmethod
    def fits(cls, config: Mapping[str, object]) -> bool:
        return kind_of(config) != "gemma4_unified_vision"

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        return cls(part_of(config), text_width(config))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Each linear has four bounds or none. Without `use_clipped_linears` in config.json they count for nothing.

        Raises ModelError for a linear that has some.
        """
        kept, bounds = {}, defaultdict[str, set[str]](set)
        for name, array in weights.items():
            head, _, last = name.rpartition(".")
            if last not in BOUNDS:
                kept[name] = array
            elif self.clamped:
                kept[name] = array.reshape(())
                bounds[head].add(last)
        for head, found in bounds.items():
            if len(found) < len(BOUNDS):
                missing = ", ".join(sorted(set(BOUNDS) - found))
                raise ModelError(f"a vision tower's {head} must have all four bounds or none, missing: {missing}")
        if _TABLE in weights:  # these are the dense tensors, so the bounds are among them
            for index, block in enumerate(self.encoder.layers):
                block.free_but(bounds, f"encoder.layers.{index}")
        return kept

    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        x = self.patch_embedder(patches, grid)
        yield x
        angles = rotary_angles(grid, self.head // 2, self.theta)
        for layer in self.encoder.layers:
            x = yield from layer.steps(x, angles, self.piece_bytes)
            yield x
        yield self._features(x, grid)

    def _features(self, x: mx.array, grid: Grid) -> mx.array:
        """Pools, scales, norms and projects `x` [patches, hidden], in float32: the scale can leave float16's range."""
        rows, columns = grid.rows // self.pool, grid.columns // self.pool
        squares = x.astype(mx.float32).reshape(rows, self.pool, columns, self.pool, self.hidden)
        # The reference rounds here too.
        pooled = squares.mean(axis=(1, 3)).flatten(0, 1).astype(x.dtype).astype(mx.float32) * self.hidden**0.5
        if "std_bias" in self:
            pooled = (pooled - self.std_bias) * self.std_scale
        return self.embedding_projection(mx.fast.rms_norm(pooled, None, self.eps).astype(x.dtype))

    def encode_bytes(self, grid: Grid) -> int:
        itemsize = work_bytes(self.patch_embedder.position_embedding_table.dtype)
        row_bytes, inner_bytes = max(self.hidden, self.heads * self.head) * itemsize, self.inner * itemsize
        embedding = embedding_bytes(grid.patches, self.pixels, row_bytes)
        layers = transformer_bytes(grid.patches, row_bytes, inner_bytes, self.heads, self.piece_bytes)
        return max(embedding, layers)


# --- Gemma 4 unified (12B): no transformer, each patch is embedded by itself.


class Gemma4UnifiedTower(Tower):
    """Norms and two projections. `patches` [count, 48 * 48 * 3] are row-major, each y, x, channel, and a soft token.

    Source: huggingface/transformers, models/gemma4_unified.
    """

    names = (
        (r"(?:model\.)?(?:embed_vision|vision_embedder\.multimodal_embedder)\.", ""),
        (r"(?:model\.)?vision_embedder\.", ""),
    )

    def __init__(self, vision: Mapping[str, object], width: int) -> None:
        super().__init__()
        side = few(vision, "patch_size", 16) * few(vision, "pooling_kernel_size", 3)
        self.pixels = 3 * few(vision, "model_patch_size", side) ** 2
        hidden = size(vision, "mm_embed_dim", 3840)
        if size(vision, "output_proj_dims", hidden) != hidden:
            found = vision["output_proj_dims"]
            raise ModelError(f"config.json: output_proj_dims must be mm_embed_dim, which is {hidden}, found {found}")
        self.width, self.hidden, self.eps = width, hidden, real(vision, "rms_norm_eps", 1e-6)
        self.patch_ln1 = LayerNorm(self.pixels)
        self.patch_dense = Linear(self.pixels, hidden)
        self.patch_ln2 = LayerNorm(hidden)
        self.pos_embedding = mx.zeros((size(vision, "mm_posemb_size", 1120), 2, hidden))  # columns, rows
        self.pos_norm = LayerNorm(hidden)
        self.embedding_projection = Linear(hidden, width, bias=False)

    @classmethod
    def fits(cls, config: Mapping[str, object]) -> bool:
        return kind_of(config) == "gemma4_unified_vision"

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        return cls(part_of(config), text_width(config))

    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        pixels = (patches.astype(mx.float32) / 255).astype(self.pos_embedding.dtype)
        x = self.patch_dense(self.patch_ln1(pixels))
        yield x
        x = self.patch_ln2(x) + summed_rows(self.pos_embedding[:, 0], self.pos_embedding[:, 1], grid)
        yield self.embedding_projection(mx.fast.rms_norm(self.pos_norm(x), None, self.eps))

    def encode_bytes(self, grid: Grid) -> int:
        return embedding_bytes(grid.patches, self.pixels, self.hidden * work_bytes(self.pos_embedding.dtype))
