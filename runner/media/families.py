"""The preparation of pictures in each family of models: their size, their rows, and the tokens around them.

Arithmetic alone. numpy is not imported: `geometry.cut` calls methods of the arrays that it is given.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar, NamedTuple, Self

from runner.errors import MediaError, ModelError
from runner.media.geometry import CHANNEL_Y_X, Y_X_CHANNEL, Alpha, Geometry, Pixels, cut, grid
from runner.model.fields import Config, first_size, required_token, section, text, token


class Around(NamedTuple):
    """The tokens that stand for a picture: `start`, then `soft` once for each soft token, then `end`.

    An integer is an id, from config.json; a text is a special token whose id the tokenizer knows.
    """

    start: int | str
    soft: int | str
    end: int | str


@dataclass(frozen=True)
class Family(ABC):
    """The preparation of pictures in one family of models, made from the model's config."""

    name: ClassVar[str]
    """In keys of caches."""
    title: ClassVar[str]
    """In texts that hosts show: `qwen3.5 does not support audio input`."""
    version: ClassVar[int] = 1
    """Of the preparation: another number for other rows from the same bytes and geometry."""
    alpha: ClassVar[Alpha]
    """The treatment of transparency by `decode`."""
    mrope: ClassVar[bool] = False
    """Positions have three channels: time, row and column."""
    order: ClassVar[tuple[int, int, int]] = CHANNEL_Y_X
    """Of the values in a row of the tower."""

    bidirectional: bool = field(default=False, kw_only=True)
    """Soft tokens of one picture attend to each other in both directions, in sliding layers."""

    @property
    def splits(self) -> bool:
        """A prefill may end between two soft tokens of one picture: only where they attend to earlier ones alone."""
        return not self.bidirectional

    @classmethod
    @abstractmethod
    def from_config(cls, config: Config, preprocessor: Config) -> Self:
        """Returns the preparation that config.json and preprocessor_config.json ({} if there is none) describe.

        Raises ModelError for fields that make no sense. What the tower cannot do is refused by the tower.
        """

    @abstractmethod
    def geometry(self, width: int, height: int) -> Geometry:
        """Returns what becomes of a picture of `width` x `height` pixels. Raises MediaError if it cannot be used."""

    @staticmethod
    @abstractmethod
    def around(config: Config) -> Around:
        """Returns the tokens that stand for a picture. Raises ModelError if config.json lacks one, or for nonsense."""

    def patches(self, pixels: Pixels, geometry: Geometry) -> Pixels:
        """Returns the tower's rows, uint8 [rows * columns, patch * patch * 3], of pixels of the size in `geometry`."""
        return cut(pixels, geometry.width // geometry.columns, self.order)


def _over_budget(width: int, height: int) -> MediaError:
    return MediaError(f"image {width}x{height} exceeds the patch budget after resize")


# --- Qwen 3.5, 3.6 and 3.8: dense, mixture of experts, and the names with `next`.

_MIN_PIXELS = 65_536
_MAX_PIXELS = 16_777_216
"""Of every picture after resizing. Constants of the family: preprocessor_config.json is not asked."""
_LONGEST = 200


@dataclass(frozen=True)
class Qwen35(Family):
    """Sides are rounded to whole blocks of patches, then scaled until the number of pixels is within bounds.

    Rows go block by block, so that the tower merges neighbours by a reshape. A row has one copy of the patch: channel,
    y, x. The tower's weights for the second moment in time belong to the same values.
    """

    name: ClassVar[str] = "qwen3_5"
    title: ClassVar[str] = "qwen3.5"
    alpha: ClassVar[Alpha] = "drop"
    mrope: ClassVar[bool] = True

    patch: int = 16
    merge: int = 2
    min_pixels: int = _MIN_PIXELS
    max_pixels: int = _MAX_PIXELS

    @classmethod
    def from_config(cls, config: Config, preprocessor: Config) -> Self:
        del preprocessor
        vision = section(config, "vision_config")
        return cls(first_size(16, (vision, "patch_size")), first_size(2, (vision, "spatial_merge_size")))

    def geometry(self, width: int, height: int) -> Geometry:
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

    def patches(self, pixels: Pixels, geometry: Geometry) -> Pixels:
        del geometry
        return cut(pixels, self.patch, self.order, self.merge)

    @staticmethod
    def around(config: Config) -> Around:
        return Around(
            required_token(config, "vision_start_token_id"),
            required_token(config, "image_token_id"),
            required_token(config, "vision_end_token_id"),
        )


# --- Gemma 4 with a tower (e2b, e4b, 26B-A4B, 31B), and without one (12B).

BUDGETS = (70, 140, 280, 560, 1120)
"""The numbers of soft tokens that the models know."""
_BUDGET = 280


@dataclass(frozen=True)
class Gemma4(Family):
    """The picture fills its budget of soft tokens as far as its shape allows: small ones grow, large ones shrink.

    Of several budgets, in ascending order, the smallest counts with which no side shrinks, else the largest. A row is
    y, x, channel. Positions in the tower are the grid's.
    """

    name: ClassVar[str] = "gemma4"
    title: ClassVar[str] = "gemma4"
    alpha: ClassVar[Alpha] = "drop"
    order: ClassVar[tuple[int, int, int]] = Y_X_CHANNEL

    patch: int = 16
    pool: int = 3
    budgets: tuple[int, ...] = (_BUDGET,)

    @classmethod
    def from_config(cls, config: Config, preprocessor: Config) -> Self:
        """Reads the budget, too. Raises ModelError for one that the models do not know."""
        vision = section(config, "vision_config")
        own = section(config, "text_config") or config
        budget = first_size(
            _BUDGET,
            (config, "vision_soft_tokens_per_image"),
            (vision, "default_output_length"),
            (vision, "num_soft_tokens"),
            (preprocessor, "max_soft_tokens"),
        )
        if budget not in BUDGETS:
            raise ModelError(f"config.json: soft tokens of an image: want one of {BUDGETS}, found {budget}")
        patch, pool = first_size(16, (vision, "patch_size")), first_size(3, (vision, "pooling_kernel_size"))
        merged = first_size(patch * pool, (vision, "model_patch_size"))
        if merged != patch * pool:
            raise ModelError(f"config.json: model_patch_size: want {patch * pool}, found {merged}")
        return cls(patch, pool, (budget,), bidirectional=own.get("use_bidirectional_attention") == "vision")

    def geometry(self, width: int, height: int) -> Geometry:
        side = self.patch * self.pool
        for budget in self.budgets:
            rows, columns = self._token_grid(width, height, budget)
            if columns * side >= width and rows * side >= height:
                break
        return self._cut(columns * side, rows * side)

    def _cut(self, width: int, height: int) -> Geometry:
        return grid(width, height, self.patch, self.pool)

    def _token_grid(self, width: int, height: int, budget: int) -> tuple[int, int]:
        """Returns rows and columns of soft tokens. A picture too narrow for one gets one, and its shape is lost."""
        scale = math.sqrt(budget * (self.patch * self.pool) ** 2 / (width * height))
        rows = math.floor(scale * height / (self.patch * self.pool))
        columns = math.floor(scale * width / (self.patch * self.pool))
        if rows == 0 and columns == 0:
            raise MediaError(f"image {width}x{height} is too small to process")
        if rows == 0:
            rows, columns = 1, min(width // height, budget)
        elif columns == 0:
            rows, columns = min(height // width, budget), 1
        if rows * columns > budget:
            raise _over_budget(width, height)
        return rows, columns

    @staticmethod
    def around(config: Config) -> Around:
        return Around(
            required_token(config, "boi_token_id"),
            required_token(config, "image_token_id"),
            required_token(config, "eoi_token_id"),
        )


@dataclass(frozen=True)
class Gemma4Unified(Gemma4):
    """Without a tower: one patch of 48 pixels is one soft token, nothing is pooled afterwards."""

    name: ClassVar[str] = "gemma4_unified"

    def _cut(self, width: int, height: int) -> Geometry:
        return grid(width, height, self.patch * self.pool, 1)


# --- Glimmer, in both forms of its config: Hugging Face's, and the older one without sub-objects.


@dataclass(frozen=True)
class Glimmer(Family):
    """Sides become whole numbers of soft tokens, as many as the picture has or fewer; the nearest shape wins.

    A row is channel, y, x: one copy of the patch, as for qwen3.5.
    """

    name: ClassVar[str] = "glimmer"
    title: ClassVar[str] = "glimmer"
    alpha: ClassVar[Alpha] = "weigh"

    patch: int = 14
    downsample: int = 2
    max_tokens: int = 4096

    @classmethod
    def from_config(cls, config: Config, preprocessor: Config) -> Self:
        del preprocessor
        vision = section(config, "vision_config")
        patch = first_size(14, (vision, "patch_size"), (config, "vision_patch_size"))
        return cls(patch, first_size(2, (vision, "merge_size"), (config, "vision_downsample_factor")))

    def geometry(self, width: int, height: int) -> Geometry:
        side = self.patch * self.downsample
        rows, columns = self._token_grid(height / side, width / side, height / width)
        if rows * columns > self.max_tokens:
            raise _over_budget(width, height)
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

    @staticmethod
    def around(config: Config) -> Around:
        soft = required_token(config, "image_token_id", "patch_token_id")
        return Around("<|image_start|>", soft, "<|image_end|>")


# --- Nemotron-H omni, whose tower is a RADIO.

_MIN_PATCHES = 1024
_MAX_PATCHES = 13_312
_MAX_MODEL_LEN = 16_384
_RESERVED_TOKENS = 4


@dataclass(frozen=True)
class NemotronH(Family):
    """Sides are rounded up to whole patches, scaled into the bounds, and made even for the pixel shuffle.

    A row is channel, y, x. `max_patches` is the budget of one picture.
    """

    name: ClassVar[str] = "nemotron_h"
    title: ClassVar[str] = "nemotron_h"
    alpha: ClassVar[Alpha] = "black"

    patch: int = 16
    downsample: int = 2
    min_patches: int = _MIN_PATCHES
    max_patches: int = _MAX_PATCHES

    @classmethod
    def from_config(cls, config: Config, preprocessor: Config) -> Self:
        """Reads the bounds, for which preprocessor_config.json has the last word."""
        vision = section(config, "vision_config")
        places = (preprocessor, vision, section(vision, "args"))
        least = first_size(_MIN_PATCHES, *((place, "min_num_patches") for place in places))
        most = first_size(_MAX_PATCHES, *((place, "max_num_patches") for place in places))
        tokens = first_size(_MAX_MODEL_LEN, (preprocessor, "max_model_len")) - _RESERVED_TOKENS
        return cls(min_patches=least, max_patches=max(least, min(most, tokens * cls.downsample**2)))

    def geometry(self, width: int, height: int) -> Geometry:
        rows, columns = (max(1, round(side / self.patch + 0.5)) for side in (height, width))
        shrink = min(math.sqrt(self.max_patches / (rows * columns)), 1)
        rows, columns = max(1, math.floor(shrink * rows)), max(1, math.floor(shrink * columns))
        if self.min_patches < self.max_patches and rows * columns < self.min_patches:
            stretch = math.sqrt(self.min_patches / (rows * columns))
            rows, columns = math.ceil(stretch * rows), math.ceil(stretch * columns)
        rows = self._divisible(rows, columns)
        columns = self._divisible(columns, rows)
        if rows * columns > self.max_patches:
            raise _over_budget(width, height)
        return grid(columns * self.patch, rows * self.patch, self.patch, self.downsample)

    def _divisible(self, side: int, other: int) -> int:
        """Returns `side` rounded to a multiple of `downsample`: up where the budget allows it, else down."""
        rest = side % self.downsample
        if not rest:
            return side
        longer = side - rest + self.downsample
        return longer if longer * other <= self.max_patches else max(self.downsample, side - rest)

    @staticmethod
    def around(config: Config) -> Around:
        """Returns texts for tokens that config.json only spells."""
        soft = token(config, "img_context_token_id", "image_token_id")
        return Around(
            text(config, "img_start_token", "<img>"),
            soft or text(config, "img_context_token", "<image>"),
            text(config, "img_end_token", "</img>"),
        )
