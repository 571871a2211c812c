"""Pictures for Qwen 3.5, 3.6 and 3.8: dense, mixture of experts, and the names with `next`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from runner.errors import MediaError, ModelError
from runner.pictures.alpha import Alpha
from runner.pictures.families.family import CHANNEL_Y_X, Around, check_size, count, cut, required_token, section
from runner.pictures.geometry import Geometry, grid

if TYPE_CHECKING:
    from runner.pictures.geometry import Pixels

MIN_PIXELS = 65_536
MAX_PIXELS = 16_777_216
"""Of every picture after resizing. Constants of the family: preprocessor_config.json is not asked."""
_LONGEST = 200


@dataclass(frozen=True)
class Qwen35:
    """Sides are rounded to whole blocks of patches, then scaled until the number of pixels is within bounds.

    Rows go block by block, so that the tower merges neighbours by a reshape. A row has one copy of the patch: channel,
    y, x. The tower's weights for the second moment in time belong to the same values.
    """

    name: ClassVar[str] = "qwen3_5"
    title: ClassVar[str] = "qwen3.5"
    version: ClassVar[int] = 1
    alpha: ClassVar[Alpha] = "drop"
    mrope: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = False
    splits: ClassVar[bool] = True

    patch: int = 16
    merge: int = 2
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS

    @classmethod
    def from_config(cls, config: Mapping[str, object], preprocessor: Mapping[str, object]) -> Self:
        """Returns the preparation for a model's config. Raises ModelError for fields that make no sense."""
        del preprocessor
        vision = section(config, "vision_config")
        if vision.get("deepstack_visual_indexes"):
            raise ModelError("config.json: deepstack_visual_indexes: not supported for qwen3.5")
        channels = count(3, (vision, "in_channels"))
        if channels != 3:
            raise ModelError(f"config.json: in_channels: want 3, found {channels}")
        return cls(count(16, (vision, "patch_size")), count(2, (vision, "spatial_merge_size")))

    def geometry(self, width: int, height: int) -> Geometry:
        """Returns what becomes of a picture of `width` x `height` pixels. Raises MediaError for very long ones."""
        check_size(width, height)
        ratio = max(width, height) / min(width, height)
        if ratio > _LONGEST:
            raise MediaError(f"image aspect ratio {ratio:.0f} exceeds {_LONGEST}")
        side = self.patch * self.merge
        columns, rows = round(width / side), round(height / side)
        if rows * columns * side**2 > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            columns = max(1, math.floor(width / shrink / side))
            rows = max(1, math.floor(height / shrink / side))
        elif rows * columns * side**2 < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (width * height))
            columns = math.ceil(width * stretch / side)
            rows = math.ceil(height * stretch / side)
        return grid(columns * side, rows * side, self.patch, self.merge)

    def patches(self, pixels: "Pixels", geometry: Geometry) -> "Pixels":
        """Returns the tower's rows: uint8 [rows * columns, 3 * patch * patch], in blocks of merge x merge patches."""
        del geometry
        return cut(pixels, self.patch, CHANNEL_Y_X, self.merge)

    @staticmethod
    def around(config: Mapping[str, object]) -> Around:
        """Returns the tokens that stand for a picture. Raises ModelError if config.json lacks one."""
        return Around(
            required_token(config, "vision_start_token_id"),
            required_token(config, "image_token_id"),
            required_token(config, "vision_end_token_id"),
        )
