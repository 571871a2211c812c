"""Glimmer's tower, in the form of transformers and in Meta's own."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Self

import mlx.core as mx
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from runner.errors import ModelError
from runner.pictures.towers.block import (
    embedding_bytes,
    resampled,
    rotary_angles,
    transformer_bytes,
    turned,
    work_bytes,
)
from runner.pictures.towers.fields import few, head_width, only, part_of, real, rope_theta, size, text_width, words
from runner.pictures.towers.tower import Grid, Layer, Steps, Tower, attend, in_pieces

# --- Reads the sizes of Glimmer's tower, from `config.json` in the form of transformers or in Meta's own.

WINDOW, FULL = "window_attention", "full_attention"
_THETA = 10_000.0


class Sizes(NamedTuple):
    """The numbers of a tower. `interleaved`: the two of a rotary pair lie beside each other, not half a head apart."""

    hidden: int
    inner: int
    heads: int
    patch: int
    copies: int
    merge: int
    table: Grid
    kinds: tuple[str, ...]
    output: int
    adapter: int
    width: int
    theta: float
    eps: float
    interleaved: bool


def read_sizes(config: Mapping[str, object]) -> Sizes:
    """Returns the sizes of the tower that a whole `config.json` describes. Raises ModelError for nonsense."""
    sizes = _published(config) if "text_config" in config else _original(config)
    head_width(sizes.hidden, sizes.heads, 4)  # two directions, two halves each
    if sizes.output != sizes.hidden * sizes.merge**2:
        wanted = f"{sizes.hidden} * {sizes.merge}^2"
        raise ModelError(f"config.json: a vision tower's output must be {wanted} wide, found {sizes.output}")
    return sizes


def _published(config: Mapping[str, object]) -> Sizes:
    """Reads the form of transformers. Defaults are those of its class."""
    vision = part_of(config)
    only(vision, "hidden_act", "gelu")
    only(config, "projector_hidden_act", "gelu")
    hidden, merge = size(vision, "hidden_size", 1536), few(vision, "merge_size", 2)
    return Sizes(
        hidden=hidden,
        inner=size(vision, "intermediate_size", 8960),
        heads=size(vision, "num_attention_heads", 16),
        patch=few(vision, "patch_size", 14),
        copies=few(vision, "patch_temporal", 2),
        merge=merge,
        table=Grid(few(vision, "pos_emb_height", 32), few(vision, "pos_emb_width", 32)),
        kinds=words(vision, "layer_types", (WINDOW, FULL), _kinds(few(vision, "num_hidden_layers", 50), 4)),
        output=size(config, "out_hidden_size", hidden * merge**2),
        adapter=size(config, "projector_hidden_size", 4096),
        width=text_width(config),
        theta=rope_theta(vision, _THETA),
        eps=real(vision, "layer_norm_eps", 1e-5),
        interleaved=False,
    )


def _original(config: Mapping[str, object]) -> Sizes:
    """Reads Meta's own form: one object, rotary pairs beside each other, kinds of layers by a period."""
    hidden = size(config, "vision_latent_dim")
    return Sizes(
        hidden=hidden,
        inner=int(real(config, "vision_mlp_ratio") * hidden),
        heads=size(config, "vision_heads"),
        patch=few(config, "vision_patch_size"),
        copies=few(config, "vision_patch_temporal"),
        merge=few(config, "vision_downsample_factor"),
        table=Grid(few(config, "vision_pos_emb_grid_h"), few(config, "vision_pos_emb_grid_w")),
        kinds=_kinds(few(config, "vision_layers"), size(config, "vision_sparse_attention_factor", 1)),
        output=size(config, "vision_output_dim"),
        adapter=size(config, "vision_adapter_dim"),
        width=text_width(config),
        theta=_THETA,
        eps=1e-5,
        interleaved=True,
    )


def _kinds(layers: int, period: int) -> tuple[str, ...]:
    """Full attention in every layer whose number is a multiple of `period`, and in the last."""
    return tuple(FULL if number % period == 0 or number == layers else WINDOW for number in range(1, layers + 1))


class Attention(Layer):
    """Within segments that follow each other."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.head = sizes.heads, sizes.hidden // sizes.heads
        self.interleaved = sizes.interleaved
        self.q_proj, self.k_proj, self.v_proj, self.proj = (Linear(sizes.hidden, sizes.hidden) for _ in range(4))

    def steps(self, x: mx.array, angles: mx.array, segments: Sequence[slice], piece_bytes: int) -> Steps:
        """Attends within each segment of `x` [patches, hidden]; `angles` is [patches, head / 2]."""
        count, row_bytes = len(x), 3 * x.nbytes // len(x)
        joined = yield from in_pieces(partial(self._projected, x, angles), count, row_bytes, piece_bytes, axis=2)
        parts: list[mx.array] = []
        for rows in segments:
            if parts:
                yield parts[-1]
            queries, keys, values = (joined[index : index + 1, :, rows] for index in range(3))
            parts.append((yield from attend(queries, keys, values, self.head**-0.5, piece_bytes)))
        attended = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        del joined, queries, keys, values, parts  # else they would stay in memory to the end
        return (yield from in_pieces(partial(self._left, attended), count, row_bytes, piece_bytes))

    def _projected(self, x: mx.array, angles: mx.array, rows: slice) -> mx.array:
        """Returns queries, keys and values [3, heads, rows, head]."""
        x, angles = x[rows], angles[rows]
        queries, keys = (self._turned(linear(x), angles) for linear in (self.q_proj, self.k_proj))
        return mx.stack([queries, keys, self.v_proj(x).reshape(queries.shape)]).swapaxes(1, 2)

    def _left(self, attended: mx.array, rows: slice) -> mx.array:
        """Returns the output [rows, hidden] for what was attended to, [1, heads, patches, head]."""
        return self.proj(attended[0, :, rows].swapaxes(0, 1).flatten(1))

    def _turned(self, x: mx.array, angles: mx.array) -> mx.array:
        half = self.head // 2
        pair = (half, 2) if self.interleaved else (2, half)
        parts = x.reshape(-1, self.heads, *pair)
        return turned(parts, angles[:, None], axis=pair.index(2) + 2).reshape(-1, self.heads, self.head)


class FeedForward(Layer):
    """Two linears."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(sizes.hidden, sizes.inner), Linear(sizes.inner, sizes.hidden)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(gelu(self.fc1(x)))


class Block(Layer):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        self.is_full, self.inner = kind == FULL, sizes.inner
        self.norm1, self.norm2 = (LayerNorm(sizes.hidden, sizes.eps) for _ in range(2))
        self.attn, self.mlp = Attention(sizes), FeedForward(sizes)

    def steps(self, x: mx.array, angles: mx.array, windows: Sequence[slice], piece_bytes: int) -> Steps:
        """Returns `x` [patches, hidden], gone through the layer."""
        segments = [slice(0, len(x))] if self.is_full else windows
        x = x + (yield from self.attn.steps(self.norm1(x), angles, segments, piece_bytes))
        return (yield from in_pieces(partial(self._fed, x), len(x), self.inner * x.itemsize, piece_bytes))

    def _fed(self, x: mx.array, rows: slice) -> mx.array:
        return x[rows] + self.mlp(self.norm2(x[rows]))


class PatchEmbedder(Layer):
    """Pixels and positions to rows. The table of positions is stretched over the picture."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.table, self.copies = sizes.table, sizes.copies
        self.patch_embedding = Linear(sizes.copies * 3 * sizes.patch**2, sizes.hidden, bias=False)
        self.position_embedding_table = Embedding(sizes.table.patches, sizes.hidden)

    def __call__(self, patches: mx.array, grid: Grid, dtype: mx.Dtype) -> mx.array:
        pixels = (patches.astype(mx.float32) / 127.5 - 1).astype(dtype)
        # A picture is a film of equal frames. Adding up the weight's columns instead is not possible if it is packed.
        rows = self.patch_embedding(mx.tile(pixels, (1, self.copies)))
        table = self.position_embedding_table(mx.arange(self.table.patches))
        return rows + resampled(table, self.table, grid).astype(dtype)


class Adapter(Layer):
    """From the merged rows of the tower to the width of the projection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = Linear(inputs, outputs, bias=False)
        self.fc2 = Linear(outputs, outputs, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return gelu(self.fc2(gelu(self.fc1(x))))


class GlimmerTower(Tower):
    """A transformer over 14 px patches. `patches` [count, 3 * 14 * 14] are row-major, each channel, y, x.

    A soft token is made of 2 x 2 patches, so a grid's rows and columns are even. The features come without the norm
    that follows in the reference, because mlx-lm's class norms what it takes for embeddings. Source:
    huggingface/transformers, models/muse_glimmer.
    """

    names = (
        (r"(?:model\.)?vision_tower\.(?!.*rotary_emb\.)", ""),
        (r"(?:model\.)?vision_adapter\.(?:fc1|c_fc)\.", "vision_adapter.fc1."),
        (r"(?:model\.)?vision_adapter\.(?:fc2|c_proj)\.", "vision_adapter.fc2."),
        (r"(?:model\.)?vision_projection\.", "vision_projection."),
        (r"(?:model\.)?vision_encoder\.conv1_linear\.", "patch_embedder.patch_embedding."),
        (r"(?:model\.)?vision_encoder\.positional_embedding_vlm$", "patch_embedder.position_embedding_table.weight"),
        (r"(?:model\.)?vision_encoder\.(?=ln_p)", ""),
        (r"(?:model\.)?vision_encoder\.transformer\.(\d+)\.ln_(?=[12]\.)", r"layers.\1.norm"),
        (r"(?:model\.)?vision_encoder\.transformer\.(\d+)\.attn\.o_proj\.", r"layers.\1.attn.proj."),
        (r"(?:model\.)?vision_encoder\.transformer\.(\d+)\.attn\.(?=[qkv]_proj\.)", r"layers.\1.attn."),
        (r"(?:model\.)?vision_encoder\.transformer\.(\d+)\.mlp\.c_fc\.", r"layers.\1.mlp.fc1."),
        (r"(?:model\.)?vision_encoder\.transformer\.(\d+)\.mlp\.c_proj\.", r"layers.\1.mlp.fc2."),
    )

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.width = sizes, sizes.width
        self.patch_embedder = PatchEmbedder(sizes)
        self.ln_pre, self.ln_post = (LayerNorm(sizes.hidden, sizes.eps) for _ in range(2))
        self.layers = [Block(sizes, kind) for kind in sizes.kinds]
        self.vision_adapter = Adapter(sizes.output, sizes.adapter)
        self.vision_projection = Linear(sizes.adapter, sizes.width, bias=False)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        return cls(read_sizes(config))

    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        order, windows = _windows(grid, self.sizes.table)
        x = self.ln_pre(self.patch_embedder(patches, grid, self.ln_pre.weight.dtype))[order]
        yield x
        angles = rotary_angles(grid, self.sizes.hidden // self.sizes.heads // 2, self.sizes.theta)
        angles = angles.flatten(1)[order]
        for layer in self.layers:
            x = yield from layer.steps(x, angles, windows, self.piece_bytes)
            yield x
        merged = self._merged(self.ln_post(x[mx.argsort(order)]), grid)
        yield self.vision_projection(self.vision_adapter(merged))

    def _merged(self, x: mx.array, grid: Grid) -> mx.array:
        """Lays squares of patches into one row each: [patches, hidden] to [soft tokens, hidden * merge^2]."""
        merge = self.sizes.merge
        blocks = x.reshape(grid.rows // merge, merge, grid.columns // merge, merge, self.sizes.hidden)
        return blocks.transpose(0, 2, 4, 1, 3).reshape(-1, self.sizes.output)

    def encode_bytes(self, grid: Grid) -> int:
        sizes, itemsize = self.sizes, work_bytes(self.ln_pre.weight.dtype)
        embedding = embedding_bytes(grid.patches, sizes.copies * 3 * sizes.patch**2, sizes.hidden * 4)
        layers = transformer_bytes(
            grid.patches, sizes.hidden * itemsize, sizes.inner * itemsize, sizes.heads, self.piece_bytes
        )
        return max(embedding, layers)


def _windows(grid: Grid, side: Grid) -> tuple[mx.array, list[slice]]:
    """Cuts a grid into windows of at most `side` patches: the order that lays them out one after the other, and where
    each of them is then."""
    cells = mx.arange(grid.patches).reshape(grid)
    parts = [
        cells[top : top + side.rows, left : left + side.columns].flatten()
        for top in range(0, grid.rows, side.rows)
        for left in range(0, grid.columns, side.columns)
    ]
    ends = [0, *itertools.accumulate(len(part) for part in parts)]
    return mx.concatenate(parts), list(itertools.starmap(slice, itertools.pairwise(ends)))
