"""The format, size and orientation of a picture, from a walk over the parts of its file before the pixels.

The walk is bounded: a part is passed over by its length, and a file with too many parts is refused. It also says which
parts the decoder needs, so that no decoder meets metadata, where files can hide work that is quadratic in their size.
"""

import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from runner.errors import MediaError
from runner.media.avif import avif_size
from runner.media.formats import served_format
from runner.media.orientation import UPRIGHT, orientation_of

MAX_PIXELS = 100_000_000
"""Pictures of more pixels are refused."""
TOO_LARGE = f"more than {MAX_PIXELS // 1_000_000} megapixels, which are the most that are decoded"
MOST_PARTS = 4096
"""The most segments, chunks or blocks before the pixels. Cameras, phones and editors write up to some hundred."""
_MOST_TABLE_BYTES = 1 << 16  # of a JPEG before its pixels; all tables that it can use take 4 KB
_MOST_FILL_BYTES = 1 << 16  # between the segments of a JPEG
_MARKER = re.compile(rb"\xff([^\xff\0])", re.DOTALL)
_SIDEWAYS = 5
"""From this orientation on, width and height change places."""


class Header(NamedTuple):
    """Format and size of a picture, in pixels as the viewer sees it: after `orientation` was applied."""

    format: str
    """One of `runner.media.formats.SERVED`."""
    width: int
    height: int
    orientation: int
    """EXIF's number, 1 to 8: how the stored pixels must be turned and mirrored."""
    kept: tuple[tuple[int, int], ...] = ()
    """The start and end of each part of the file that a decoder needs; empty for all of it."""

    @property
    def stored_size(self) -> tuple[int, int]:
        """Width and height before the orientation was applied."""
        return (self.height, self.width) if self.orientation >= _SIDEWAYS else (self.width, self.height)

    def pieces(self, data: bytes) -> list[memoryview]:
        """Returns the parts of the file that a decoder needs, without copying them."""
        whole = memoryview(data)
        return [whole[start:stop] for start, stop in self.kept] if self.kept else [whole]


class _Found(NamedTuple):
    """The result of a walk."""

    width: int
    height: int
    orientation: int = UPRIGHT
    kept: tuple[tuple[int, int], ...] = ()


def read_header(data: bytes) -> Header:
    """Returns what is known of a picture without decoding it. Raises MediaError if it will not be decoded."""
    name = served_format(data)
    try:
        width, height, orientation, kept = _WALKS[name](data)
    except (struct.error, IndexError):
        raise damaged(name, "the file ends too early") from None
    if width <= 0 or height <= 0:
        raise damaged(name, f"its size is {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise MediaError(f"decode image: {width} x {height} pixels are {TOO_LARGE}")
    if orientation >= _SIDEWAYS:
        width, height = height, width
    return Header(name, width, height, orientation, kept)


def damaged(name: str, why: str) -> MediaError:
    """Returns the refusal of a picture of this format."""
    return MediaError(f"decode image: damaged {name}: {why}")


def _crowded(name: str) -> MediaError:
    return damaged(name, f"more than {MOST_PARTS} parts come before its pixels")


def _png(data: bytes) -> _Found:
    width, height = struct.unpack_from(">II", data, 16)
    kept, orientation, place = [(0, 8)], UPRIGHT, 8
    for _ in range(MOST_PARTS):
        length, kind = struct.unpack_from(">I4s", data, place)
        if kind == b"IDAT":
            return _Found(width, height, orientation, (*kept, (place, len(data))))
        if kind == b"IEND" or (place == 8) != (kind == b"IHDR"):
            raise damaged("PNG", "its chunks are not in order")
        following = place + 12 + length
        if kind == b"eXIf":
            orientation = orientation_of(data[place + 8 : following - 4])
        elif kind in (b"IHDR", b"PLTE", b"tRNS", b"acTL", b"fcTL"):  # the last two count frames
            kept.append((place, following))
        place = following
    raise _crowded("PNG")


def _jpeg(data: bytes) -> _Found:
    kept, exif, size, tables, fill, place = [(0, 2)], b"", (0, 0), 0, 0, 2
    for _ in range(MOST_PARTS):
        found = _MARKER.search(data, place, place + 2 + _MOST_FILL_BYTES - fill)
        if found is None:
            break
        fill += found.start() - place
        start, place, marker = found.start(), found.end(), found[1][0]
        if 0xD0 <= marker <= 0xD8 or marker == 0x01:  # nothing belongs to these
            continue
        if marker == 0xDA:
            return _Found(*size, orientation_of(exif), (*kept, (start, len(data))))
        if marker < 0xC0 or marker in (0xC8, 0xD9) or 0xF0 <= marker <= 0xFD:
            raise damaged("JPEG", f"it has a marker 0x{marker:02x} before its pixels")
        (length,) = struct.unpack_from(">H", data, place)
        place += length
        if length < 2:
            raise damaged("JPEG", "a segment is shorter than its own length")
        if marker == 0xE1 and data.startswith(b"Exif\0\0", found.end() + 2) and not exif:
            exif = data[found.end() + 2 : place]
        if marker >= 0xE0 and not data.startswith((b"JFIF\0", b"Adobe"), found.end() + 2):
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xCC):
            bits, height, width = struct.unpack_from(">BHH", data, found.end() + 2)
            if bits != 8:
                raise MediaError(f"decode image: a JPEG of {bits} bits is not supported: convert the image to PNG")
            size = width, height
        kept.append((start, place))
        tables += place - start
        if tables > _MOST_TABLE_BYTES:
            raise damaged("JPEG", f"its tables have more than {_MOST_TABLE_BYTES} bytes")
    else:
        raise _crowded("JPEG")
    raise damaged("JPEG", "the file ends too early, or holds something between its segments")


def _gif(data: bytes) -> _Found:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    kept, parts = [(0, place)], 0
    while parts < MOST_PARTS:
        parts += 1
        start, kind = place, data[place]
        if kind == 0x2C:
            x, y, columns, rows = struct.unpack_from("<HHHH", data, place + 1)
            return _Found(max(width, x + columns), max(height, y + rows), UPRIGHT, (*kept, (place, len(data))))
        if kind == 0x3B:
            raise damaged("GIF", "it ends before its first frame")
        place += 1
        if kind != 0x21:
            continue
        place += 1
        while data[place] and parts < MOST_PARTS:
            parts += 1
            place += data[place] + 1
        place += 1
        if data[start + 1] == 0xF9:  # what is transparent
            kept.append((start, place))
    raise _crowded("GIF")


def _webp(data: bytes) -> _Found:
    kind, flags = data[12:16], data[20]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return _Found(width, height, orientation_of(_webp_exif(data)) if flags & 0x08 else UPRIGHT)
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return _Found((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind != b"VP8 " or data[23:26] != b"\x9d\x01\x2a":
        raise damaged("WebP", "it does not begin with a picture")
    width, height = struct.unpack_from("<HH", data, 26)
    return _Found(width & 0x3FFF, height & 0x3FFF)


def _webp_exif(data: bytes) -> bytes:
    place = 12
    for _ in range(MOST_PARTS):
        if place + 8 > len(data):
            return b""
        kind, length = struct.unpack_from("<4sI", data, place)
        if kind == b"EXIF":
            return data[place + 8 : place + 8 + length]
        place += 8 + length + length % 2
    raise _crowded("WebP")


def _bmp(data: bytes) -> _Found:
    if struct.unpack_from("<I", data, 14) == (12,):
        return _Found(*struct.unpack_from("<HH", data, 18))
    width, height = struct.unpack_from("<Ii", data, 18)
    return _Found(width, abs(height))


def _avif(data: bytes) -> _Found:
    return _Found(*avif_size(data))


_WALKS: dict[str, Callable[[bytes], _Found]] = {
    "PNG": _png,
    "JPEG": _jpeg,
    "GIF": _gif,
    "WebP": _webp,
    "BMP": _bmp,
    "AVIF": _avif,
}
