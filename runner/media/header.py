"""The facts about a picture that are known before any pixel is decoded."""

from typing import NamedTuple

MAX_PIXELS = 100_000_000
"""Pictures of more pixels are refused."""


class Header(NamedTuple):
    """Format and size of a picture, in pixels as the viewer sees it: after `orientation` was applied."""

    format: str
    """One of `runner.media.formats.SERVED`."""
    width: int
    height: int
    orientation: int
    """EXIF's number, 1 to 8: how the stored pixels must be turned and mirrored."""
