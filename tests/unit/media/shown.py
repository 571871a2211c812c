"""Pictures in prompts, without any pixels."""

from runner.media.geometry import Geometry, grid
from runner.media.header import PictureHeader
from runner.media.prompt import Picture


def picture(rows: int = 2, columns: int = 3, name: int = -1, data: bytes = b"") -> Picture:
    """A picture of so many soft tokens."""
    geometry: Geometry = grid(columns * 32, rows * 32, 16, 2)
    header = PictureHeader("PNG", geometry.width, geometry.height, 1)
    return Picture(data=data, header=header, geometry=geometry, name=name)
