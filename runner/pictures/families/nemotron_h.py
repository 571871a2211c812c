"""Pictures for Nemotron-H omni, whose tower is a RADIO."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from runner.errors import MediaError, ModelError
from runner.pictures.alpha import Alpha
from runner.pictures.families.family import (
    CHANNEL_Y_X,
    LARGEST,
    Around,
    Config,
    check_size,
    count,
    cut,
    section,
    text,
    token,
)
from runner.pictures.geometry import Geometry, grid

if TYPE_CHECKING:
    from runner.pictures.geometry import Pixels

MIN_PATCHES = 1024
MAX_PATCHES = 13_312
MAX_MODEL_LEN = 16_384
_RESERVED_TOKENS = 4
_PATCH = 16
_DOWNSAMPLE = 2


@dataclass(frozen=True)
class NemotronH:
    """Sides are rounded up to whole patches, scaled into the bounds, and made even for the pixel shuffle.

    A row is channel, y, x. `max_patches` is the budget of one picture.
    """

    name: ClassVar[str] = "nemotron_h"
    title: ClassVar[str] = "nemotron_h"
    version: ClassVar[int] = 1
    alpha: ClassVar[Alpha] = "black"
    mrope: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = False
    splits: ClassVar[bool] = True

    patch: int = _PATCH
    downsample: int = _DOWNSAMPLE
    min_patches: int = MIN_PATCHES
    max_patches: int = MAX_PATCHES

    @classmethod
    def from_config(cls, config: Mapping[str, object], preprocessor: Mapping[str, object]) -> Self:
        """Returns the preparation for a model's config, where preprocessor_config.json has the last word.

        Raises ModelError for fields that make no sense, and for patches that no released model has.
        """
        vision = section(config, "vision_config")
        args = section(vision, "args")
        patch = count(_PATCH, (preprocessor, "patch_size"), (vision, "patch_size"), (config, "patch_size"))
        if patch != _PATCH:
            raise ModelError(f"config.json: patch_size: want {_PATCH}, found {patch}")
        for place in (preprocessor, config):
            _check_ratio(place)
        places = (preprocessor, vision, args)
        least = count(MIN_PATCHES, *((place, "min_num_patches") for place in places))
        most = count(MAX_PATCHES, *((place, "max_num_patches") for place in places))
        tokens = count(MAX_MODEL_LEN, (preprocessor, "max_model_len")) - _RESERVED_TOKENS
        return cls(patch, _DOWNSAMPLE, least, max(least, min(most, tokens * _DOWNSAMPLE**2)))

    def geometry(self, width: int, height: int) -> Geometry:
        """Returns what becomes of a picture of `width` x `height` pixels. Raises MediaError for very long ones."""
        check_size(width, height)
        rows, columns = (max(1, round(side / self.patch + 0.5)) for side in (height, width))
        shrink = min(math.sqrt(self.max_patches / (rows * columns)), 1)
        rows, columns = max(1, math.floor(shrink * rows)), max(1, math.floor(shrink * columns))
        if self.min_patches < self.max_patches and rows * columns < self.min_patches:
            stretch = math.sqrt(self.min_patches / (rows * columns))
            rows, columns = math.ceil(stretch * rows), math.ceil(stretch * columns)
        rows = self._divisible(rows, columns)
        columns = self._divisible(columns, rows)
        if rows * columns > self.max_patches:
            raise MediaError(f"image {width}x{height} exceeds the patch budget after resize")
        return grid(columns * self.patch, rows * self.patch, self.patch, self.downsample)

    def _divisible(self, side: int, other: int) -> int:
        """Returns `side` rounded to a multiple of `downsample`: up where the budget allows it, else down."""
        rest = side % self.downsample
        if not rest:
            return side
        longer = side - rest + self.downsample
        return longer if longer * other <= self.max_patches else max(self.downsample, side - rest)

    def patches(self, pixels: "Pixels", geometry: Geometry) -> "Pixels":
        """Returns the tower's rows: uint8 [rows * columns, 3 * patch * patch], from left to right, top to bottom."""
        del geometry
        return cut(pixels, self.patch, CHANNEL_Y_X)

    @staticmethod
    def around(config: Mapping[str, object]) -> Around:
        """Returns the tokens that stand for a picture; those that config.json only spells are texts.

        Raises ModelError for nonsense.
        """
        soft = token(config, "img_context_token_id", "image_token_id")
        return Around(
            text(config, "img_start_token", "<img>"),
            soft or text(config, "img_context_token", "<image>"),
            text(config, "img_end_token", "</img>"),
        )


def _check_ratio(config: Config) -> None:
    """Raises ModelError unless `downsample_ratio` is missing or makes one soft token of 2 x 2 patches."""
    found = config.get("downsample_ratio")
    if found is None or found == 0:
        return
    if not isinstance(found, int | float) or not 1 / LARGEST < found <= LARGEST or round(1 / found) != _DOWNSAMPLE:
        raise ModelError(f"config.json: downsample_ratio: want {1 / _DOWNSAMPLE}, found {found!r}")
