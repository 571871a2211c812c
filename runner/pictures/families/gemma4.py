"""Pictures for Gemma 4 with a tower: e2b, e4b, 26B-A4B and 31B. `gemma4_unified` has those without one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from runner.errors import MediaError, ModelError
from runner.pictures.alpha import Alpha
from runner.pictures.families.family import Y_X_CHANNEL, Around, check_size, count, cut, required_token, section
from runner.pictures.geometry import Geometry, grid

if TYPE_CHECKING:
    from runner.pictures.geometry import Pixels

BUDGETS = (70, 140, 280, 560, 1120)
"""The numbers of soft tokens that the models know."""
DEFAULT_BUDGET = 280


@dataclass(frozen=True)
class Gemma4:
    """The picture fills its budget of soft tokens as far as its shape allows: small ones grow, large ones shrink.

    Of several budgets, in ascending order, the smallest counts with which no side shrinks, else the largest. A row is
    y, x, channel. Positions in the tower are the grid's.
    """

    name: ClassVar[str] = "gemma4"
    title: ClassVar[str] = "gemma4"
    version: ClassVar[int] = 1
    alpha: ClassVar[Alpha] = "drop"
    mrope: ClassVar[bool] = False

    patch: int = 16
    pool: int = 3
    budgets: tuple[int, ...] = (DEFAULT_BUDGET,)
    bidirectional: bool = False

    @property
    def splits(self) -> bool:
        """A prefill may end between two soft tokens of one picture: only where they attend to earlier ones alone."""
        return not self.bidirectional

    @classmethod
    def from_config(cls, config: Mapping[str, object], preprocessor: Mapping[str, object]) -> Self:
        """Returns the preparation for a model's config, with the budget that it names.

        Raises ModelError for fields that make no sense, and for a budget that the models do not know.
        """
        vision = section(config, "vision_config")
        text = section(config, "text_config") or config
        budget = count(
            DEFAULT_BUDGET,
            (config, "vision_soft_tokens_per_image"),
            (vision, "default_output_length"),
            (vision, "num_soft_tokens"),
            (preprocessor, "max_soft_tokens"),
        )
        if budget not in BUDGETS:
            raise ModelError(f"config.json: soft tokens of an image: want one of {BUDGETS}, found {budget}")
        patch, pool = count(16, (vision, "patch_size")), count(3, (vision, "pooling_kernel_size"))
        merged = count(patch * pool, (vision, "model_patch_size"))
        if merged != patch * pool:
            raise ModelError(f"config.json: model_patch_size: want {patch * pool}, found {merged}")
        return cls(patch, pool, (budget,), text.get("use_bidirectional_attention") == "vision")

    def geometry(self, width: int, height: int) -> Geometry:
        """Returns what becomes of a picture of `width` x `height` pixels. Raises MediaError for very long ones."""
        check_size(width, height)
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
            raise MediaError(f"image {width}x{height} exceeds the patch budget after resize")
        return rows, columns

    def patches(self, pixels: "Pixels", geometry: Geometry) -> "Pixels":
        """Returns the tower's rows: uint8 [rows * columns, patch * patch * 3], from left to right, top to bottom."""
        return cut(pixels, geometry.width // geometry.columns, Y_X_CHANNEL)

    @staticmethod
    def around(config: Mapping[str, object]) -> Around:
        """Returns the tokens that stand for a picture. Raises ModelError if config.json lacks one."""
        return Around(
            required_token(config, "boi_token_id"),
            required_token(config, "image_token_id"),
            required_token(config, "eoi_token_id"),
        )


# --- Pictures for Gemma 4 without a tower: 12B, whose text model reads whole patches of 48 pixels.


@dataclass(frozen=True)
class Gemma4Unified(Gemma4):
    """As with a tower, but one patch is one soft token: nothing is pooled afterwards."""

    name: ClassVar[str] = "gemma4_unified"

    def _cut(self, width: int, height: int) -> Geometry:
        return grid(width, height, self.patch * self.pool, 1)
