"""Glimmer's tower. Reads config.json and tensors in the form of transformers and in Meta's own form."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from runner.errors import ModelError
from runner.media.families import Glimmer
from runner.media.towers.block import PlainBlock, head_width, interpolated, rotary_angles, turn_by
from runner.media.towers.tower import Grid, Tower, TowerLayer, embedding_bytes, work_bytes
from runner.model.fields import Config, expect, positive, section, size, small_count, strings

WINDOW, FULL = "window_attention", "full_attention"
_THETA = 10_000.0


class GlimmerSizes(NamedTuple):
    """The sizes of a tower. If `interleaved`, the numbers of a rotary pair are neighbours, else half a head apart."""

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
    theta: float
    eps: float
    interleaved: bool


def read_sizes(config: Config) -> GlimmerSizes:
    """Returns the sizes of the tower that a whole `config.json` describes. Raises ModelError for invalid fields."""
    sizes = _published(config) if "text_config" in config else _original(config)
    head_width(sizes.hidden, sizes.heads, 4)  # heads rotate by row and by column, in pairs
    if sizes.output != sizes.hidden * sizes.merge**2:
        wanted = f"{sizes.hidden} * {sizes.merge}^2"
        raise ModelError(f"config.json: a vision tower's output must be {wanted} wide, found {sizes.output}")
    return sizes


def _published(config: Config) -> GlimmerSizes:
    """Returns the sizes from a config in the form of transformers. Defaults are those of transformers' class."""
    vision = section(config, "vision_config")
    expect(vision, "hidden_act", "gelu")
    expect(config, "projector_hidden_act", "gelu")
    hidden, merge = size(vision, "hidden_size", 1536), small_count(vision, "merge_size", 2)
    return GlimmerSizes(
        hidden=hidden,
        inner=size(vision, "intermediate_size", 8960),
        heads=size(vision, "num_attention_heads", 16),
        patch=small_count(vision, "patch_size", 14),
        copies=small_count(vision, "patch_temporal", 2),
        merge=merge,
        table=Grid(small_count(vision, "pos_emb_height", 32), small_count(vision, "pos_emb_width", 32)),
        kinds=strings(vision, "layer_types", (WINDOW, FULL), _kinds(small_count(vision, "num_hidden_layers", 50), 4)),
        output=size(config, "out_hidden_size", hidden * merge**2),
        adapter=size(config, "projector_hidden_size", 4096),
        theta=positive(section(vision, "rope_parameters"), "rope_theta", _THETA),
        eps=positive(vision, "layer_norm_eps", 1e-5),
        interleaved=False,
    )


def _original(config: Config) -> GlimmerSizes:
    """Returns the sizes from a config in Meta's own form, which is one object without objects in it."""
    hidden = size(config, "vision_latent_dim")
    return GlimmerSizes(
        hidden=hidden,
        inner=int(positive(config, "vision_mlp_ratio") * hidden),
        heads=size(config, "vision_heads"),
        patch=small_count(config, "vision_patch_size"),
        copies=small_count(config, "vision_patch_temporal"),
        merge=small_count(config, "vision_downsample_factor"),
        table=Grid(small_count(config, "vision_pos_emb_grid_h"), small_count(config, "vision_pos_emb_grid_w")),
        kinds=_kinds(small_count(config, "vision_layers"), size(config, "vision_sparse_attention_factor", 1)),
        output=size(config, "vision_output_dim"),
        adapter=size(config, "vision_adapter_dim"),
        theta=_THETA,
        eps=1e-5,
        interleaved=True,
    )


def _kinds(layers: int, period: int) -> tuple[str, ...]:
    """Returns the kinds of layers: FULL for each multiple of `period` and for the last layer, else WINDOW."""
    return tuple(FULL if number % period == 0 or number == layers else WINDOW for number in range(1, layers + 1))


class GlimmerEmbedder(TowerLayer):
    """Maps the pixels and positions of patches to rows."""

    def __init__(self, sizes: GlimmerSizes) -> None:
        super().__init__()
        self.table = sizes.table
        self.copies = sizes.copies
        self.patch_embedding = Linear(sizes.copies * 3 * sizes.patch**2, sizes.hidden, bias=False)
        self.position_embedding_table = Embedding(sizes.table.patches, sizes.hidden)

    def __call__(self, patches: mx.array, grid: Grid, dtype: mx.Dtype) -> mx.array:
        pixels = (patches.astype(mx.float32) / 127.5 - 1).astype(dtype)
        # A picture stands as `copies` equal frames of a film. Columns of a packed weight cannot be added up instead.
        rows = self.patch_embedding(mx.tile(pixels, (1, self.copies)))
        table = self.position_embedding_table(mx.arange(self.table.patches))
        return rows + stretched_table(table, self.table, grid).astype(dtype)


def stretched_table(table: mx.array, sides: Grid, grid: Grid) -> mx.array:
    """Returns float32 [patches, width]: `table` [sides.patches, width], stretched over `grid`.

    Interpolates between the centres of cells; zeros surround the table. Rows of the grid match rows of the table. In
    Meta's first code and Ollama's runner, rows and columns are exchanged if the table is not square
    (pytorch/torchtitan#4244).
    """
    rows, columns = (
        (place + 0.5) * (side / count) - 0.5 for place, side, count in zip(grid.places(), sides, grid, strict=True)
    )
    return interpolated(lambda index: table[index], sides, rows, columns, zeros=True)


class Adapter(TowerLayer):
    """Maps the merged rows of the tower to the width of the projection's input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = Linear(inputs, outputs, bias=False)
        self.fc2 = Linear(outputs, outputs, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return gelu(self.fc2(gelu(self.fc1(x))))


class GlimmerTower(Tower):
    """A transformer. `patches` [count, 3 * 14 * 14] go row by row; the values of each patch are ordered channel, y, x.

    2 x 2 patches become a soft token, so a grid's rows and columns must be even. The reference norms the features
    last; here, mlx-lm's class norms all embeddings instead. Source: huggingface/transformers, models/muse_glimmer.
    """

    family = Glimmer
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

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.sizes = sizes = read_sizes(config)
        self.patch_embedder = GlimmerEmbedder(sizes)
        self.ln_pre = LayerNorm(sizes.hidden, sizes.eps)
        self.ln_post = LayerNorm(sizes.hidden, sizes.eps)
        self.layers = [
            PlainBlock(sizes.hidden, sizes.inner, sizes.heads, gelu, sizes.eps, joined=False) for _ in sizes.kinds
        ]
        self.vision_adapter = Adapter(sizes.output, sizes.adapter)
        self.vision_projection = Linear(sizes.adapter, self.width, bias=False)

    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        order, windows = _windows(grid, self.sizes.table)
        x = self.ln_pre(self.patch_embedder(patches, grid, self.ln_pre.weight.dtype))[order]
        yield x
        rows, columns = grid.places()
        half = self.sizes.hidden // self.sizes.heads // 2
        angles = rotary_angles((columns, rows), half, self.sizes.theta).flatten(1)[order]
        turn = turn_by(angles, (half, 2), 1) if self.sizes.interleaved else turn_by(angles, (2, half), 0)
        for layer, kind in zip(self.layers, self.sizes.kinds, strict=True):
            segments = [slice(None)] if kind == FULL else windows
            x = yield from layer.steps(x, self.piece_bytes, turn, segments)
            yield x
        merge, x = self.sizes.merge, self.ln_post(x[mx.argsort(order)])
        squares = x.reshape(grid.rows // merge, merge, grid.columns // merge, merge, self.sizes.hidden)
        merged = squares.transpose(0, 2, 4, 1, 3).reshape(-1, self.sizes.output)  # [soft tokens, hidden * merge^2]
        yield self.vision_projection(self.vision_adapter(merged))

    def encode_bytes(self, grid: Grid) -> int:
        sizes, itemsize = self.sizes, work_bytes(self.ln_pre.weight.dtype)
        embedding = embedding_bytes(grid.patches, sizes.copies * 3 * sizes.patch**2, sizes.hidden * 4)
        return max(embedding, self.layers[0].peak_bytes(grid.patches, itemsize, self.piece_bytes))


def _windows(grid: Grid, side: Grid) -> tuple[mx.array, list[slice]]:
    """Cuts a grid into windows of at most `side.rows` x `side.columns` patches. Returns the indices of patches, window
    by window, and the slice of each window in this list."""
    cells = mx.arange(grid.patches).reshape(grid)
    parts = [
        cells[top : top + side.rows, left : left + side.columns].flatten()
        for top in range(0, grid.rows, side.rows)
        for left in range(0, grid.columns, side.columns)
    ]
    ends = [0, *itertools.accumulate(len(part) for part in parts)]
    return mx.concatenate(parts), list(itertools.starmap(slice, itertools.pairwise(ends)))
