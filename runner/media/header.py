"""What is known of a picture before any of its pixels."""

from typing import NamedTuple

MAX_PIXELS = 100_000_000
"""Pictures of more pixels are refused."""
DECODE_BYTES = 16
"""Upper bound of what decoding takes for a moment, for each pixel of the source: 2 for a GIF, 16 for a WebP."""


class Header(NamedTuple):
    """Format and size of a picture, in pixels as the viewer sees it: after `orientation` was applied."""

    format: str
    """One of `runner.media.formats.SERVED`."""
    width: int
    height: int
    orientation: int
    """EXIF's number, 1 to 8: how the stored pixels must be turned and mirrored."""
