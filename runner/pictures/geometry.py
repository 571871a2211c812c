"""The sizes of a picture: pixels after resizing, patches for the tower, soft tokens for the text model."""

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pixels: TypeAlias = "npt.NDArray[np.uint8]"
"""uint8 [height, width, 3]: red, green, blue. Or the rows of a tower, made of them."""


class Geometry(NamedTuple):
    """Everything about a prepared picture that follows from its size alone."""

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


def grid(width: int, height: int, patch: int, merge: int) -> Geometry:
    """Returns the geometry of `width` x `height` pixels cut into patches of `patch` x `patch` pixels, of which
    `merge` x `merge` become one soft token. Both sides are multiples of patch x merge."""
    rows, columns = height // patch, width // patch
    token_rows, token_columns = rows // merge, columns // merge
    return Geometry(width, height, rows, columns, token_rows * token_columns, token_rows, token_columns)
