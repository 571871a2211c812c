"""Gemma 4's towers for pictures: the transformer of e2b, e4b, 26B-A4B and 31B, and the projections of 12B."""

from collections.abc import Container, Iterator, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm

from runner.errors import ModelError
from runner.media.families import Gemma4, Gemma4Unified
from runner.media.towers.block import TowerBlock, rotary_angles, turn_by
from runner.media.towers.tower import Grid, Tower, TowerLayer, embedding_bytes, work_bytes
from runner.model.fields import Config, expect, flag, positive, section, size, small_count

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class ClampedLinear(TowerLayer):
    """A linear without a bias. If `clamped`, clips its input and output to bounds."""

    def __init__(self, inputs: int, outputs: int, clamped: bool) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs, bias=False)
        if clamped:
            self.input_min = self.output_min = mx.array(-mx.inf)
            self.input_max = self.output_max = mx.array(mx.inf)

    def __call__(self, x: mx.array) -> mx.array:
        if "input_min" not in self:
            return self.linear(x)
        # A bound of another type would change the type of the whole array.
        low, high, least, most = (mx.array(self[name], x.dtype) for name in BOUNDS)
        return mx.clip(self.linear(mx.clip(x, low, high)), least, most)


def bounds_of(weights: dict[str, mx.array], fault: str) -> dict[str, mx.array]:
    """Removes the bounds of linears from `weights`, and returns these bounds by name, as arrays of shape (). Raises
    ModelError, with the text `fault`, for a linear that has only some of the four bounds."""
    found = {name: weights.pop(name) for name in [*weights] if name.rpartition(".")[2] in BOUNDS}
    for linear in sorted({name.rpartition(".")[0] for name in found}):
        if missing := [bound for bound in BOUNDS if f"{linear}.{bound}" not in found]:
            raise ModelError(fault.format(linear=linear, missing=", ".join(sorted(missing))))
    return {name: array.reshape(()) for name, array in found.items()}


def free_but(bounds: Container[str], module: TowerLayer) -> None:
    """Removes from `module` the bounds of all linears whose bounds are not among the names `bounds`."""
    for name, each in Module.named_modules(module):
        if isinstance(each, ClampedLinear) and f"{name}.{BOUNDS[0]}" not in bounds:
            for bound in BOUNDS:
                each.pop(bound, None)


def summed_rows(columns: mx.array, rows: mx.array, grid: Grid) -> mx.array:
    """Returns [patches, width]: for each patch, the sum of its entries in the tables `columns` and `rows`, both
    [positions, width]. Raises ValueError for a table with too few positions."""
    if len(columns) < grid.columns or len(rows) < grid.rows:
        raise ValueError(f"{len(columns)} x {len(rows)} positions are too few for {grid}")
    return (columns[: grid.columns][None] + rows[: grid.rows][:, None]).flatten(0, 1)


_TABLE = "patch_embedder.position_embedding_table"


class GemmaEmbedder(TowerLayer):
    """Maps the pixels and positions of patches to rows."""

    def __init__(self, values: int, positions: int, hidden: int) -> None:
        super().__init__()
        self.input_proj = Linear(values, hidden, bias=False)
        self.position_embedding_table = mx.ones((2, positions, hidden))  # for columns, for rows

    def __call__(self, patches: mx.array, grid: Grid) -> mx.array:
        columns, rows = self.position_embedding_table
        pixels = 2 * (patches.astype(mx.float32) / 255 - 0.5)
        return self.input_proj(pixels.astype(columns.dtype)) + summed_rows(columns, rows, grid)


class GemmaAttention(TowerLayer):
    """The linears and norms of attention. Norms of queries and keys replace the scaling of scores."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head: int, eps: float, clamped: bool) -> None:
        super().__init__()
        self.q_proj = ClampedLinear(hidden, heads * head, clamped)
        self.k_proj = ClampedLinear(hidden, kv_heads * head, clamped)
        self.v_proj = ClampedLinear(hidden, kv_heads * head, clamped)
        self.o_proj = ClampedLinear(heads * head, hidden, clamped)
        self.q_norm = RMSNorm(head, eps)
        self.k_norm = RMSNorm(head, eps)


class GemmaFeedForward(TowerLayer):
    def __init__(self, hidden: int, inner: int, clamped: bool) -> None:
        super().__init__()
        self.gate_proj = ClampedLinear(hidden, inner, clamped)
        self.up_proj = ClampedLinear(hidden, inner, clamped)
        self.down_proj = ClampedLinear(inner, hidden, clamped)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class GemmaBlock(TowerBlock):
    """Attention and feed-forward, each with a norm before and after it."""

    def __init__(
        self, hidden: int, inner: int, heads: int, kv_heads: int, head: int, eps: float, *, clamped: bool
    ) -> None:
        super().__init__(hidden, inner, heads, head, kv_heads=kv_heads, scale=1.0)
        self.eps = eps
        self.self_attn = GemmaAttention(hidden, heads, kv_heads, head, eps, clamped)
        self.mlp = GemmaFeedForward(hidden, inner, clamped)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)

    def project(self, x: mx.array) -> Sequence[mx.array]:
        normed, attn = self.input_layernorm(x), self.self_attn
        queries = attn.q_norm(attn.q_proj(normed).reshape(-1, self.heads, self.head))
        keys = attn.k_norm(attn.k_proj(normed).reshape(-1, self.kv_heads, self.head))
        values = mx.fast.rms_norm(attn.v_proj(normed).reshape(-1, self.kv_heads, self.head), None, self.eps)
        return queries, keys, values

    def output(self, attended: mx.array) -> mx.array:
        return cast("mx.array", self.post_attention_layernorm(self.self_attn.o_proj(attended)))

    def feed(self, x: mx.array) -> mx.array:
        return cast("mx.array", self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))))


class Gemma4Tower(Tower):
    """A transformer. `patches` [count, 16 * 16 * 3] go row by row; the values of each patch are ordered y, x, channel.

    The mean of 3 x 3 patches becomes a soft token, so a grid's rows and columns must be multiples of 3. Source:
    huggingface/transformers, models/gemma4.
    """

    family = Gemma4
    names = (
        (
            r"(?:model\.)?vision_tower\.(encoder\.layers\.\d+\.\w+\.\w+_proj)\.(?=weight$|scales$|biases$)",
            r"\1.linear.",
        ),
        (r"(?:model\.)?vision_tower\.(?!.*rotary_emb\.)", ""),
        (r"(?:model\.)?embed_vision\.", ""),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision = section(config, "vision_config")
        hidden, inner = size(vision, "hidden_size", 768), size(vision, "intermediate_size", 3072)
        heads = size(vision, "num_attention_heads", 12)
        kv_heads, head = size(vision, "num_key_value_heads", heads), size(vision, "head_dim", 64)
        if head % 4:  # for two directions, each with pairs of numbers
            raise ModelError(f"config.json: a vision tower's head_dim must be a multiple of 4, found {head}")
        if heads % kv_heads:
            raise ModelError(f"config.json: a vision tower's {kv_heads} heads for keys must divide {heads}")
        expect(vision, "hidden_activation", "gelu_pytorch_tanh")
        self.hidden = hidden
        self.head = head
        self.clamped = flag(vision, "use_clipped_linears")
        self.eps = positive(vision, "rms_norm_eps", 1e-6)
        self.theta = positive(section(vision, "rope_parameters"), "rope_theta", 100.0)
        self.pool = small_count(vision, "pooling_kernel_size", 3)
        # Not `values`: that is a method of MLX's modules, which are dicts.
        self.pixels = 3 * small_count(vision, "patch_size", 16) ** 2
        self.patch_embedder = GemmaEmbedder(self.pixels, size(vision, "position_embedding_size", 10240), hidden)
        self.encoder = TowerLayer()  # a level of the parameters' names
        self.encoder.layers = [
            GemmaBlock(hidden, inner, heads, kv_heads, head, self.eps, clamped=self.clamped)
            for _ in range(small_count(vision, "num_hidden_layers", 16))
        ]
        if flag(vision, "standardize"):
            self.std_bias = mx.zeros((hidden,))
            self.std_scale = mx.ones((hidden,))
        self.embedding_projection = Linear(hidden, self.width, bias=False)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drops bounds unless config.json has `use_clipped_linears`. Raises ModelError for a linear that has only some
        of the four bounds."""
        bounds = bounds_of(weights, "a vision tower's {linear} must have all four bounds or none, missing: {missing}")
        if _TABLE in weights:  # the call with the dense tensors, among them all bounds
            free_but(bounds if self.clamped else (), self)
        return weights | bounds if self.clamped else weights

    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        x = self.patch_embedder(patches, grid)
        yield x
        rows, columns = grid.places()
        # One half of each head rotates by the column, the other by the row. Each half has its own pairs.
        turn = turn_by(rotary_angles((columns, rows), self.head // 2, self.theta), (2, 2, self.head // 4), 1)
        for block in self.encoder.layers:
            x = yield from block.steps(x, self.piece_bytes, turn)
            yield x
        yield self._features(x, grid)

    def _features(self, x: mx.array, grid: Grid) -> mx.array:
        """Pools, scales, norms and projects `x` [patches, hidden]. Scaled values need float32: float16 may overflow."""
        rows, columns = grid.rows // self.pool, grid.columns // self.pool
        squares = x.astype(mx.float32).reshape(rows, self.pool, columns, self.pool, self.hidden)
        # Rounds between the mean and the scale, as the reference does.
        pooled = squares.mean(axis=(1, 3)).flatten(0, 1).astype(x.dtype).astype(mx.float32) * self.hidden**0.5
        if "std_bias" in self:
            pooled = (pooled - self.std_bias) * self.std_scale
        return self.embedding_projection(mx.fast.rms_norm(pooled, None, self.eps).astype(x.dtype))

    def encode_bytes(self, grid: Grid) -> int:
        itemsize = work_bytes(self.patch_embedder.position_embedding_table.dtype)
        block: GemmaBlock = self.encoder.layers[0]
        embedding = embedding_bytes(grid.patches, self.pixels, max(self.hidden, block.heads * block.head) * itemsize)
        return max(embedding, block.peak_bytes(grid.patches, itemsize, self.piece_bytes))


class Gemma4UnifiedTower(Tower):
    """The tower of 12B: norms and two projections, which make a soft token of each patch by itself. `patches` [count,
    48 * 48 * 3] go row by row; the values of each patch are ordered y, x, channel.

    Source: huggingface/transformers, models/gemma4_unified.
    """

    family = Gemma4Unified
    names = (
        (r"(?:model\.)?(?:embed_vision|vision_embedder\.multimodal_embedder)\.", ""),
        (r"(?:model\.)?vision_embedder\.", ""),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        vision = section(config, "vision_config")
        side = small_count(vision, "patch_size", 16) * small_count(vision, "pooling_kernel_size", 3)
        self.pixels = 3 * small_count(vision, "model_patch_size", side) ** 2
        hidden = size(vision, "mm_embed_dim", 3840)
        if size(vision, "output_proj_dims", hidden) != hidden:
            found = vision["output_proj_dims"]
            raise ModelError(f"config.json: output_proj_dims must be mm_embed_dim, which is {hidden}, found {found}")
        self.hidden = hidden
        self.eps = positive(vision, "rms_norm_eps", 1e-6)
        self.patch_ln1 = LayerNorm(self.pixels)
        self.patch_dense = Linear(self.pixels, hidden)
        self.patch_ln2 = LayerNorm(hidden)
        self.pos_embedding = mx.zeros((size(vision, "mm_posemb_size", 1120), 2, hidden))  # for columns, for rows
        self.pos_norm = LayerNorm(hidden)
        self.embedding_projection = Linear(hidden, self.width, bias=False)

    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        pixels = (patches.astype(mx.float32) / 255).astype(self.pos_embedding.dtype)
        x = self.patch_dense(self.patch_ln1(pixels))
        yield x
        x = self.patch_ln2(x) + summed_rows(self.pos_embedding[:, 0], self.pos_embedding[:, 1], grid)
        yield self.embedding_projection(mx.fast.rms_norm(self.pos_norm(x), None, self.eps))

    def encode_bytes(self, grid: Grid) -> int:
        return embedding_bytes(grid.patches, self.pixels, self.hidden * work_bytes(self.pos_embedding.dtype))
