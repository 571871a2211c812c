"""The tower of Qwen 3.5, 3.6 and 3.8, dense and with experts, and of Qwen3-Next."""

import math
from collections.abc import Iterator

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from runner.errors import ModelError
from runner.media.families import Qwen35
from runner.media.towers.block import CORNERS, NORM_EPS, PlainBlock, head_width, interpolated, rotary_angles, turn_by
from runner.media.towers.tower import Grid, Tower, TowerLayer, in_pieces
from runner.model.fields import Config, section, size, small_count

_ROOT = r"(?:model\.)?(?:visual|vision_tower)\."
_CHANNELS = 3
_THETA = 10000.0


class _Merger(TowerLayer):
    """Joins the patches of each block, and maps every block to a row of the text model's width."""

    def __init__(self, width: int, joined: int, out: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width, eps=NORM_EPS)
        self.fc1 = Linear(joined, joined)
        self.fc2 = Linear(joined, out)

    def __call__(self, x: mx.array) -> mx.array:
        """Maps rows [count, width] in the order of blocks to [blocks, out]."""
        return self.fc2(gelu(self.fc1(self.norm(x).reshape(-1, self.fc1.bias.size))))


class Qwen35Tower(Tower):
    """A transformer over patches in the order of merge blocks. A patch is one frame, ordered channel, y, x."""

    family = Qwen35
    names = (
        (rf"{_ROOT}patch_embed\.proj\.", "patch_embed."),
        (rf"{_ROOT}(blocks\.\d+\.mlp|merger)\.linear_", r"\1."),
        (_ROOT, ""),
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        part, out = section(config, "vision_config"), self.width
        if deep := part.get("deepstack_visual_indexes"):
            raise ModelError(f"config.json: unsupported deepstack_visual_indexes {deep!r}")
        if size(part, "in_channels", _CHANNELS) != _CHANNELS:
            raise ModelError(f"config.json: a vision tower of {part['in_channels']!r} channels, want {_CHANNELS}")
        if (found := size(part, "out_hidden_size", out)) != out:
            raise ModelError(f"config.json: out_hidden_size ({found}) is not the text model's hidden_size ({out})")
        positions = size(part, "num_position_embeddings")
        self.side = math.isqrt(positions)
        if self.side**2 != positions:
            raise ModelError(f"config.json: num_position_embeddings ({positions}) must be a square number")
        width, heads = size(part, "hidden_size"), size(part, "num_heads", 16)
        self.patch = small_count(part, "patch_size", 16)
        self.merge = small_count(part, "spatial_merge_size", 2)
        self.times = small_count(part, "temporal_patch_size", 2)
        self.head_width = head_width(width, heads, 4)
        self.patch_embed = Linear(_CHANNELS * self.patch**2, width)
        self.pos_embed = Embedding(positions, width)
        self.blocks = [PlainBlock(width, 1, heads, gelu_approx) for _ in range(small_count(part, "depth"))]
        self.merger = _Merger(width, self.merge**2 * width, out)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Turns the convolution over several equal frames into one matrix for a single picture. Takes the width
        inside the feed-forward networks from the tensors, as Ollama's runner does."""
        inner = weights.get("blocks.0.mlp.fc1.bias")
        if inner is not None:
            for block in self.blocks:
                block.widen(inner.size)
        name = "patch_embed.weight"
        kernel, sides = weights.get(name), (self.patch, self.patch)
        if kernel is not None:
            if kernel.shape[1:] == (self.times, *sides, _CHANNELS):
                kernel = kernel.transpose(0, 4, 1, 2, 3)
            if kernel.shape[1:] == (_CHANNELS, self.times, *sides):
                kernel = kernel.astype(mx.float32).sum(axis=2).flatten(1).astype(kernel.dtype)
            weights[name] = kernel
        return weights

    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        dtype, merge, width = self.merger.norm.weight.dtype, self.merge, self.merger.norm.weight.size
        rows, columns = self._places(grid)
        row_at, column_at = (
            mx.linspace(0, self.side - 1, count)[place] for count, place in ((grid.rows, rows), (grid.columns, columns))
        )

        def embedded(which: slice) -> mx.array:
            values = patches[which].astype(mx.float32) / 127.5 - 1
            place = interpolated(self.pos_embed, (self.side, self.side), row_at[which], column_at[which])
            return self.patch_embed(values.astype(dtype)) + place.astype(dtype)

        row_bytes = CORNERS * max(width, patches.shape[1]) * 4
        x = yield from in_pieces(embedded, patches.shape[0], row_bytes, self.piece_bytes)
        yield x
        half = self.head_width // 2
        turn = turn_by(rotary_angles((rows, columns), half, _THETA).flatten(1), (2, half), 0)
        for block in self.blocks:
            x = yield from block.steps(x, self.piece_bytes, turn)
            yield x
        joined = x.reshape(-1, merge * merge, width)
        yield (
            yield from in_pieces(
                lambda which: self.merger(joined[which].reshape(-1, width)),
                joined.shape[0],
                merge * merge * width * x.itemsize,
                self.piece_bytes,
            )
        )

    def encode_bytes(self, grid: Grid) -> int:
        itemsize, count = self.merger.norm.weight.itemsize, grid.patches
        tables = count * (self.patch_embed.weight.shape[-1] + 2 * 4 * self.head_width)
        return tables + self.blocks[0].peak_bytes(count, itemsize, self.piece_bytes)

    def _places(self, grid: Grid) -> tuple[mx.array, mx.array]:
        """Returns the row and the column of each patch [count], in the order of merge blocks."""
        merge = self.merge
        blocks = (grid.rows // merge, merge, grid.columns // merge, merge)
        rows, columns = (each.reshape(blocks).transpose(0, 2, 1, 3).flatten() for each in grid.places())
        return rows, columns
