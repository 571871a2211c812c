"""Cuts pixels into patches, one row of values for each."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.media.geometry import Pixels

CHANNELS = 3

CHANNEL_Y_X = (6, 2, 5)
Y_X_CHANNEL = (2, 5, 6)
"""Orders of the values of one patch, as axes of the array that `cut` makes."""


def cut(pixels: "Pixels", patch: int, order: tuple[int, int, int], merge: int = 1) -> "Pixels":
    """Returns the patches of `pixels` (uint8 [height, width, 3]) as rows: uint8 [count, patch * patch * 3].

    Rows follow the picture from left to right and top to bottom, or with `merge` above 1 in blocks of
    `merge` x `merge` patches: the blocks from left to right and top to bottom, and so the patches of each.
    """
    height, width, channels = pixels.shape
    side = patch * merge
    if channels != CHANNELS or height % side or width % side:
        raise ValueError(f"want sides of {side} pixels and {CHANNELS} channels, found {pixels.shape}")
    split = pixels.reshape(height // side, merge, patch, width // side, merge, patch, channels)
    return split.transpose(0, 3, 1, 4, *order).reshape(-1, patch * patch * channels)
