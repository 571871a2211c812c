"""The preparation of media in each family of models: the sizes and rows of pictures, the pieces and rows of sounds, and
the tokens around both. This module does not import numpy."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar, NamedTuple, Self

from runner.errors import MediaError, ModelError
from runner.media.geometry import CHANNEL_Y_X, Y_X_CHANNEL, Alpha, Geometry, Pixels, cut, grid
from runner.media.sound_header import FRAME, HOP, LONGEST, RATE
from runner.model.fields import Config, first_size, required_token, section, text, token


class Around(NamedTuple):
    """The tokens that stand for a picture or a sound: `start`, then `soft` once for each soft token, then `end`. An
    integer is the id of a token. A text is the name of a special token, whose id the tokenizer knows."""

    start: int | str
    soft: int | str
    end: int | str


@dataclass(frozen=True)
class PictureFamily(ABC):
    """The preparation of pictures in one family of models, made from the model's config."""

    name: ClassVar[str]
    """The family's name in the digests of items."""
    title: ClassVar[str]
    """The family's name in messages that hosts show: `qwen3.5 does not support audio input`."""
    alpha: ClassVar[Alpha]
    mrope: ClassVar[bool] = False
    """True if positions have three channels: time, row and column."""
    order: ClassVar[tuple[int, int, int]] = CHANNEL_Y_X
    """The order of the values in one row for the tower."""
    keys: ClassVar[tuple[str, str, str]] = ("boi_token_id", "image_token_id", "eoi_token_id")
    """The keys of config.json for the ids `start`, `soft` and `end` of `Around`."""

    bidirectional: bool = field(default=False, kw_only=True)
    """True if the soft tokens of a picture attend to each other in both directions, in sliding layers. No forward may
    then end between two soft tokens of one picture."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Config, preprocessor: Config) -> Self:
        """Returns the preparation that config.json and preprocessor_config.json ({} if the model has none) describe.

        Raises ModelError for invalid fields. The tower checks the fields that only the tower uses.
        """

    @abstractmethod
    def geometry(self, width: int, height: int) -> Geometry:
        """Returns the prepared sizes of a picture of `width` x `height` pixels. Raises MediaError for a bad shape."""

    @classmethod
    def around(cls, config: Config) -> Around:
        """Returns the tokens that stand for a picture. Raises ModelError for a missing or invalid id in config.json."""
        return Around(*(required_token(config, key) for key in cls.keys))

    def patches(self, pixels: Pixels, geometry: Geometry) -> Pixels:
        """Returns the tower's rows, uint8 [rows * columns, patch * patch * 3]. `pixels` has the size in `geometry`."""
        return cut(pixels, geometry.width // geometry.columns, self.order)


def _over_budget(width: int, height: int) -> MediaError:
    return MediaError(f"image {width}x{height} exceeds the patch budget after resize")


@dataclass(frozen=True)
class Qwen35(PictureFamily):
    """Qwen 3.5, 3.6 and 3.8, with and without experts, and Qwen3-Next.

    Rounds both sides to whole blocks of patches, and scales them if there are too many or too few pixels. Rows go block
    by block, so that the tower merges neighbours by a reshape. A row has one copy of its patch, ordered channel, y, x.
    """

    name: ClassVar[str] = "qwen3_5"
    title: ClassVar[str] = "qwen3.5"
    alpha: ClassVar[Alpha] = "drop"
    mrope: ClassVar[bool] = True
    keys: ClassVar[tuple[str, str, str]] = ("vision_start_token_id", "image_token_id", "vision_end_token_id")

    patch: int = 16
    merge: int = 2
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    """`min_pixels` and `max_pixels` bound every resized picture. Bounds in preprocessor_config.json are ignored."""

    @classmethod
    def from_config(cls, config: Config, preprocessor: Config) -> Self:
        del preprocessor
        vision = section(config, "vision_config")
        return cls(first_size(16, (vision, "patch_size")), first_size(2, (vision, "spatial_merge_size")))

    def geometry(self, width: int, height: int) -> Geometry:
        ratio = max(width, height) / min(width, height)
        if ratio > 200:
            raise MediaError(f"image aspect ratio {ratio:.0f} exceeds 200")
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


_BUDGETS = (70, 140, 280, 560, 1120)
"""The budgets of soft tokens for a picture that Gemma 4 supports."""


@dataclass(frozen=True)
class Gemma4(PictureFamily):
    """Gemma 4 with a tower: e2b, e4b, 26B-A4B and 31B.

    A picture grows or shrinks until it fills its budget of soft tokens. The values in a row are ordered y, x, channel.
    """

    name: ClassVar[str] = "gemma4"
    title: ClassVar[str] = "gemma4"
    alpha: ClassVar[Alpha] = "drop"
    order: ClassVar[tuple[int, int, int]] = Y_X_CHANNEL
    pools: ClassVar[bool] = True
    """True if a soft token is made of several patches, False if it is made of one large patch."""

    patch: int = 16
    pool: int = 3
    budget: int = 280

    @classmethod
    def from_config(cls, config: Config, preprocessor: Config) -> Self:
        """Also reads the budget. Raises ModelError for a budget outside `_BUDGETS`, or a wrong model_patch_size."""
        vision = section(config, "vision_config")
        own = section(config, "text_config") or config
        budget = first_size(
            cls.budget,
            (config, "vision_soft_tokens_per_image"),
            (vision, "default_output_length"),
            (vision, "num_soft_tokens"),
            (preprocessor, "max_soft_tokens"),
        )
        if budget not in _BUDGETS:
            raise ModelError(f"config.json: soft tokens of an image: want one of {_BUDGETS}, found {budget}")
        patch, pool = first_size(16, (vision, "patch_size")), first_size(3, (vision, "pooling_kernel_size"))
        merged = first_size(patch * pool, (vision, "model_patch_size"))
        if merged != patch * pool:
            raise ModelError(f"config.json: model_patch_size: want {patch * pool}, found {merged}")
        return cls(patch, pool, budget, bidirectional=own.get("use_bidirectional_attention") == "vision")

    def geometry(self, width: int, height: int) -> Geometry:
        side = self.patch * self.pool
        rows, columns = self._token_grid(width, height, side)
        patch, merge = (self.patch, self.pool) if self.pools else (side, 1)
        return grid(columns * side, rows * side, patch, merge)

    def _token_grid(self, width: int, height: int, side: int) -> tuple[int, int]:
        """Returns the rows and columns of soft tokens. A very narrow picture gets one row or column, distorted."""
        scale = math.sqrt(self.budget * side**2 / (width * height))
        rows, columns = math.floor(scale * height / side), math.floor(scale * width / side)
        if rows == 0 and columns == 0:
            raise MediaError(f"image {width}x{height} is too small to process")
        if rows == 0:
            rows, columns = 1, min(width // height, self.budget)
        elif columns == 0:
            rows, columns = min(height // width, self.budget), 1
        if rows * columns > self.budget:
            raise _over_budget(width, height)
        return rows, columns


@dataclass(frozen=True)
class Gemma4Unified(Gemma4):
    """Gemma 4 12B, whose tower has no transformer: each patch of 48 x 48 pixels becomes a soft token."""

    name: ClassVar[str] = "gemma4_unified"
    pools: ClassVar[bool] = False


@dataclass(frozen=True)
class Glimmer(PictureFamily):
    """Glimmer, in both forms of its config: the form of transformers, and Meta's own form without sub-objects.

    Rounds each side up or down to whole soft tokens, within `max_tokens`, so that the shape changes least. A row holds
    one copy of its patch, ordered channel, y, x, as for qwen3.5.
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
        """Returns `rows` and `columns`, shrunk to `max_tokens` and rounded so that their ratio is nearest to `shape`.

        The larger grid wins a tie. A very narrow picture, for which no such grid exists, gets one row or one column.
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

    @classmethod
    def around(cls, config: Config) -> Around:
        soft = required_token(config, "image_token_id", "patch_token_id")
        return Around("<|image_start|>", soft, "<|image_end|>")


@dataclass(frozen=True)
class NemotronH(PictureFamily):
    """Nemotron-H omni.

    Rounds both sides of a picture up to whole patches, scales them into the bounds, and makes the numbers of patches
    even for the pixel shuffle. The values in a row are ordered channel, y, x.
    """

    name: ClassVar[str] = "nemotron_h"
    title: ClassVar[str] = "nemotron_h"
    alpha: ClassVar[Alpha] = "black"

    patch: int = 16
    downsample: int = 2
    min_patches: int = 1024
    max_patches: int = 13_312
    """`min_patches` and `max_patches` bound the patches of one picture."""

    @classmethod
    def from_config(cls, config: Config, preprocessor: Config) -> Self:
        """Reads the bounds. Fields of preprocessor_config.json override those of config.json."""
        vision = section(config, "vision_config")
        places = (preprocessor, vision, section(vision, "args"))
        least = first_size(cls.min_patches, *((place, "min_num_patches") for place in places))
        most = first_size(cls.max_patches, *((place, "max_num_patches") for place in places))
        tokens = first_size(16_384, (preprocessor, "max_model_len")) - 4  # four tokens are reserved
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
        """Returns `side`, rounded to a multiple of `downsample`: up if `max_patches` allows it, else down."""
        rest = side % self.downsample
        if not rest:
            return side
        longer = side - rest + self.downsample
        return longer if longer * other <= self.max_patches else max(self.downsample, side - rest)

    @classmethod
    def around(cls, config: Config) -> Around:
        """Returns the tokens that stand for a picture: names of tokens whose ids config.json lacks."""
        soft = token(config, "img_context_token_id", "image_token_id")
        return Around(
            text(config, "img_start_token", "<img>"),
            soft or text(config, "img_context_token", "<image>"),
            text(config, "img_end_token", "</img>"),
        )


class Clip(NamedTuple):
    """The sizes of a prepared sound."""

    rows: tuple[int, ...]
    """The number of rows of each piece."""
    tokens: int
    """The number of soft tokens in the prompt, for all pieces together."""


@dataclass(frozen=True)
class SoundFamily(ABC):
    """The preparation of sounds in one family of models, made from the model's config."""

    name: ClassVar[str]
    """The family's name in the digests of items."""
    frame_samples: int
    """The number of samples in a row; 0 if a row is a spectrum."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Config) -> Self:
        """Returns the preparation that config.json describes. Raises ModelError for invalid fields."""

    @abstractmethod
    def clip(self, samples: int) -> Clip | None:
        """Returns the clip of a sound of `samples` samples at RATE; None if only decoding finds the pieces. Raises
        MediaError for too few samples."""

    @abstractmethod
    def clip_of(self, rows: Sequence[int]) -> Clip:
        """Returns the clip of a sound whose pieces have these numbers of `rows`."""

    @staticmethod
    def around(config: Config) -> Around:
        """Returns the tokens that stand for a sound. Raises ModelError for a missing or invalid id in config.json."""
        return Around(
            required_token(config, "boa_token_id"),
            required_token(config, "audio_token_id"),
            required_token(config, "eoa_token_id", "eoa_token_index"),
        )


@dataclass(frozen=True)
class Gemma4Sound(SoundFamily):
    """Sounds as 100 spectra a second; four spectra become a soft token. Cuts sounds of over 30 s at quiet places."""

    name: ClassVar[str] = "gemma4"
    frame_samples: int = 0

    @classmethod
    def from_config(cls, config: Config) -> Self:
        del config
        return cls()

    def clip(self, samples: int) -> Clip | None:
        if samples > LONGEST:
            return None
        if samples <= FRAME - HOP:
            raise MediaError("audio too short")
        return self.clip_of([(samples + HOP - FRAME - 1) // HOP + 1])

    def clip_of(self, rows: Sequence[int]) -> Clip:
        return Clip(tuple(rows), sum(subsampled(count) for count in rows))


def subsampled(rows: int) -> int:
    """Returns the number of rows of a piece after the tower's two convolutions, each of which halves the number."""
    return -(-rows // 4)


_FRAME_SAMPLES = 640
_MOST_FRAME_SAMPLES = RATE


@dataclass(frozen=True)
class Gemma4UnifiedSound(SoundFamily):
    """Sounds as plain samples: `frame_samples` samples become one soft token."""

    name: ClassVar[str] = "gemma4_unified"

    @classmethod
    def from_config(cls, config: Config) -> Self:
        found = section(config, "audio_config").get("audio_samples_per_token") or _FRAME_SAMPLES
        if type(found) is not int or not 0 < found <= _MOST_FRAME_SAMPLES:
            raise ModelError(f"invalid audio_samples_per_token {found}")
        return cls(found)

    def clip(self, samples: int) -> Clip:
        if not samples:
            raise MediaError("audio too short")
        return self.clip_of([-(-samples // self.frame_samples)])

    def clip_of(self, rows: Sequence[int]) -> Clip:
        return Clip(tuple(rows), sum(rows))
