"""Pictures for Glimmer, in both forms of its config: Hugging Face's, and the older one without sub-objects."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Self

from runner.errors import MediaError
from runner.pictures.alpha import Alpha
from runner.pictures.families.family import CHANNEL_Y_X, Around, check_size, count, cut, required_token, section
from runner.pictures.geometry import Geometry, grid

if TYPE_CHECKING:
    from runner.pictures.geometry import Pixels

MAX_TOKENS = 4096


@dataclass(frozen=True)
class Glimmer:
    """Sides become whole numbers of soft tokens, as many as the picture has or fewer; the nearest shape wins.

    A row is channel, y, x: one copy of the patch, as for qwen3.5.
    """

    name: ClassVar[str] = "glimmer"
    title: ClassVar[str] = "glimmer"
    version: ClassVar[int] = 1
    alpha: ClassVar[Alpha] = "weigh"
    mrope: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = False
    splits: ClassVar[bool] = True

    patch: int = 14
    downsample: int = 2
    max_tokens: int = MAX_TOKENS

    @classmethod
    def from_config(cls, config: Mapping[str, object], preprocessor: Mapping[str, object]) -> Self:
        """Returns the preparation for a model's config. Raises ModelError for fields that make no sense."""
        del preprocessor
        vision = section(config, "vision_config")
        patch = count(14, (vision, "patch_size"), (config, "vision_patch_size"))
        return cls(patch, count(2, (vision, "merge_size"), (config, "vision_downsample_factor")))

    def geometry(self, width: int, height: int) -> Geometry:
        """Returns what becomes of a picture of `width` x `height` pixels. Raises MediaError for very long ones."""
        check_size(width, height)
        side = self.patch * self.downsample
        rows, columns = self._token_grid(height / side, width / side, height / width)
        if rows * columns > self.max_tokens:
            raise MediaError(f"image {width}x{height} exceeds the patch budget after resize")
        return grid(columns * side, rows * side, self.patch, self.downsample)

    def _token_grid(self, rows: float, columns: float, shape: float) -> tuple[int, int]:
        """Returns the whole numbers next to `rows` and `columns`, shrunk to the limit, whose ratio is next to `shape`.

        The larger grid wins a tie. Slivers, which have no such grid, keep one row or one column.
        """
        if rows * columns > self.max_tokens:
            ratio = columns / rows
            rows = math.sqrt(self.max_tokens / ratio)
            columns = rows * ratio
        near = product((math.floor(rows), math.ceil(rows)), (math.floor(columns), math.ceil(columns)))
        fitting = [(r, c) for r, c in near if r >= 1 and c >= 1 and r * c <= self.max_tokens]
        if fitting:
            return min(fitting, key=lambda size: (abs(size[0] / size[1] - shape), -size[0] * size[1]))
        return max(1, math.floor(rows + 0.5)), max(1, math.floor(columns + 0.5))

    def patches(self, pixels: "Pixels", geometry: Geometry) -> "Pixels":
        """Returns the tower's rows: uint8 [rows * columns, 3 * patch * patch], from left to right, top to bottom."""
        del geometry
        return cut(pixels, self.patch, CHANNEL_Y_X)

    @staticmethod
    def around(config: Mapping[str, object]) -> Around:
        """Returns the tokens that stand for a picture. Raises ModelError if config.json lacks the soft one."""
        soft = required_token(config, "image_token_id", "patch_token_id")
        return Around("<|image_start|>", soft, "<|image_end|>")
