"""The sizes of a picture: pixels after resizing, patches for the tower, soft tokens for the text; and its rows."""

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pixels: TypeAlias = "npt.NDArray[np.uint8]"
"""uint8 [height, width, 3]: red, green, blue. Or the rows of a tower, made of them."""

Alpha = Literal["drop", "weigh", "black"]
"""The treatment of transparency, in which Ollama's families differ.
drop: ignored before resizing, so that colours under transparent pixels are seen.
weigh: colours count by their opacity when resizing, and are seen in full afterwards.
black: the picture is seen on a black ground.
"""


class Geometry(NamedTuple):
    """The sizes of a prepared picture, which follow from its size alone."""

    width: int
    height: int
    """Pixels after resizing."""
    rows: int
    columns: int
    """Patches, as the tower sees them."""
    tokens: int
    """Soft tokens in the text: token_rows x token_columns."""
    token_rows: int
    token_columns: int
    """The grid after the tower has merged patches, for positions in three channels."""

    @property
    def extent(self) -> int:
        """The number of positions in three channels that the picture takes."""
        return max(self.token_rows, self.token_columns)


def grid(width: int, height: int, patch: int, merge: int) -> Geometry:
    """Returns the geometry of `width` x `height` pixels cut into patches of `patch` x `patch` pixels; `merge` x `merge`
    patches become one soft token. Both sides are multiples of patch x merge."""
    rows, columns = height // patch, width // patch
    token_rows, token_columns = rows // merge, columns // merge
    return Geometry(width, height, rows, columns, token_rows * token_columns, token_rows, token_columns)


CHANNELS = 3

CHANNEL_Y_X = (6, 2, 5)
Y_X_CHANNEL = (2, 5, 6)
"""Orders of the values of one patch, as axes of the array that `cut` makes."""


def cut(pixels: Pixels, patch: int, order: tuple[int, int, int], merge: int = 1) -> Pixels:
    """Returns the patches of `pixels` (uint8 [height, width, 3]) as rows: uint8 [count, patch * patch * 3].

    Blocks of `merge` x `merge` patches follow each other from left to right and top to bottom, and so do the patches of
    a block.
    """
    height, width, channels = pixels.shape
    side = patch * merge
    if channels != CHANNELS or height % side or width % side:
        raise ValueError(f"want sides of {side} pixels and {CHANNELS} channels, found {pixels.shape}")
    split = pixels.reshape(height // side, merge, patch, width // side, merge, patch, channels)
    return split.transpose(0, 3, 1, 4, *order).reshape(-1, patch * patch * channels)
