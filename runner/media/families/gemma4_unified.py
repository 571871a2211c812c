"""Pictures for Gemma 4 without a tower: 12B, whose text model reads whole patches of 48 pixels."""

from dataclasses import dataclass
from typing import ClassVar

from runner.media.families.gemma4 import Gemma4
from runner.media.geometry import Geometry, grid


@dataclass(frozen=True)
class Gemma4Unified(Gemma4):
    """As with a tower, but one patch is one soft token: nothing is pooled afterwards."""

    name: ClassVar[str] = "gemma4_unified"

    def _cut(self, width: int, height: int) -> Geometry:
        return grid(width, height, self.patch * self.pool, 1)
