"""The sizes of a picture (pixels after resizing, patches for the tower, soft tokens for the prompt), and its rows."""

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pixels: TypeAlias = "npt.NDArray[np.uint8]"
"""Pixels, uint8 [height, width, 3]: red, green, blue. Or rows for a tower, cut from pixels: uint8 [rows, values]."""

Alpha = Literal["drop", "weigh", "black"]
"""A family's treatment of transparent pixels, as in Ollama's runner.
drop: opacity is ignored, so that the tower sees the colours of transparent pixels.
weigh: resizing weighs each colour by its opacity; afterwards opacity is ignored.
black: the tower sees the picture on a black ground.
"""


class Geometry(NamedTuple):
    """The sizes of a prepared picture. All of them follow from the picture's size in the file."""

    width: int
    height: int
    """`width` and `height` are in pixels, after resizing."""
    rows: int
    columns: int
    """`rows` and `columns` are the grid of patches that the tower encodes."""
    tokens: int
    """The number of soft tokens in the prompt: token_rows x token_columns."""
    token_rows: int
    token_columns: int
    """The grid of soft tokens, after the tower has merged patches. Positions in three channels need it."""

    @property
    def extent(self) -> int:
        """The distance from the picture's first position to that of the next token, in three channels."""
        return max(self.token_rows, self.token_columns)


def grid(width: int, height: int, patch: int, merge: int) -> Geometry:
    """Returns the geometry of a picture of `width` x `height` pixels. A patch has `patch` x `patch` pixels, and a soft
    token `merge` x `merge` patches. `width` and `height` must be multiples of patch x merge."""
    rows, columns = height // patch, width // patch
    token_rows, token_columns = rows // merge, columns // merge
    return Geometry(width, height, rows, columns, token_rows * token_columns, token_rows, token_columns)


CHANNELS = 3

CHANNEL_Y_X = (6, 2, 5)
Y_X_CHANNEL = (2, 5, 6)
"""The two orders of the values of one patch, as axes of the array `split` in `cut`."""


def cut(pixels: Pixels, patch: int, order: tuple[int, int, int], merge: int = 1) -> Pixels:
    """Returns the patches of `pixels` (uint8 [height, width, 3]) as rows: uint8 [count, patch * patch * 3].

    `order` is the order of the values in a row. Blocks of `merge` x `merge` patches follow each other from left to
    right and top to bottom; so do the patches inside a block.
    """
    height, width, channels = pixels.shape
    side = patch * merge
    if channels != CHANNELS or height % side or width % side:
        raise ValueError(f"want sides of {side} pixels and {CHANNELS} channels, found {pixels.shape}")
    split = pixels.reshape(height // side, merge, patch, width // side, merge, patch, channels)
    return split.transpose(0, 3, 1, 4, *order).reshape(-1, patch * patch * channels)
