"""Gemma 4 unified (12B): no transformer, each patch is embedded by itself."""

from collections.abc import Iterator, Mapping
from typing import Self

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from runner.errors import ModelError
from runner.model.towers.axes import summed_rows
from runner.model.towers.choices import few, kind_of, real
from runner.model.towers.fields import part_of, size, text_width
from runner.model.towers.peak import embedding_bytes, work_bytes
from runner.model.towers.tower import Grid, Tower


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
