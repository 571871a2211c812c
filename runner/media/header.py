"""Reads the format, size and orientation of a picture, by a walk over the parts of its file before the pixels.

The walk is bounded: it skips each part by the part's length, and refuses a file with too many parts, nested ones too.
The walk finds the parts that a decoder needs. Metadata is left out: it can hide work quadratic in a file's size.
"""

import re
import struct
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from runner.errors import MediaError

MAX_PIXELS = 100_000_000
"""Pictures of more pixels are refused."""
MOST_PARTS = 4096
"""The most segments, chunks, blocks or boxes before the pixels, nested ones included. Cameras and editors write at
most a few hundred; an AVIF of 100 megapixels has a few hundred tiles."""
_MOST_TABLE_BYTES = 1 << 16  # of a JPEG's tables before its pixels; decoding needs at most 4 KB of tables
_MOST_FILL_BYTES = 1 << 16  # fill bytes between the segments of a JPEG, in total
_MARKER = re.compile(rb"\xff([^\xff\0])", re.DOTALL)
UPRIGHT = 1
_SIDEWAYS = 5
"""From this orientation number on, stored width and height are exchanged."""
Parts: TypeAlias = Iterator[object]
"""An iterator that ends after MOST_PARTS parts of a file. All loops of one walk share the same iterator."""


class PictureHeader(NamedTuple):
    """The format and size of a picture. `width` and `height` are in pixels, after `orientation` is applied."""

    format: str
    """One of SERVED."""
    width: int
    height: int
    orientation: int = UPRIGHT
    """EXIF's number, 1 to 8, for the turn or mirroring that makes the stored pixels upright."""
    kept: tuple[tuple[int, int], ...] = ()
    """The start and end of each part of the file that a decoder needs; empty if it needs the whole file."""

    @property
    def stored_size(self) -> tuple[int, int]:
        """The width and height of the stored pixels, before the orientation is applied."""
        return (self.height, self.width) if self.orientation >= _SIDEWAYS else (self.width, self.height)

    def pieces(self, data: bytes) -> list[memoryview]:
        """Returns views of the parts of the file that a decoder needs. Leaves out empty parts."""
        whole = memoryview(data)
        return [piece for start, stop in self.kept or [(0, len(data))] if (piece := whole[start:stop])]


def read_picture_header(data: bytes) -> PictureHeader:
    """Returns the header of a picture. Raises MediaError for a damaged, too large or unsupported picture."""
    name = picture_format(data)
    if name not in SERVED:
        raise MediaError(f"decode image: {_advice(data, name)}")
    try:
        found = _WALKS[name](data, iter(range(MOST_PARTS)))
    except (struct.error, IndexError):
        raise damaged(name, "the file ends too early") from None
    width, height = found.width, found.height
    if width <= 0 or height <= 0:
        raise damaged(name, f"its size is {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise MediaError(
            f"decode image: {width} x {height} pixels exceed the limit of {MAX_PIXELS // 1_000_000} megapixels: send a"
            " smaller picture"
        )
    return found._replace(width=height, height=width) if found.orientation >= _SIDEWAYS else found


def damaged(name: str, why: str) -> MediaError:
    """Returns the error that refuses a damaged picture of the format `name`."""
    return MediaError(f"decode image: damaged {name}: {why}")


def _crowded(name: str) -> MediaError:
    return damaged(name, f"more than {MOST_PARTS} parts come before its pixels")


SERVED = ("PNG", "JPEG", "GIF", "WebP", "BMP", "AVIF")
"""The formats that are decoded. Each decoder is in every wheel of Pillow, starts no program and opens no file."""

_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\1\0", "ICO"),
    (b"8BPS", "PSD"),
    (b"%PDF", "PDF"),
    (b"%!PS", "EPS"),
    (b"\xc5\xd0\xd3\xc6", "EPS"),
)
_AVIF_BRANDS = frozenset((b"avif", b"avis"))
_HEIC_BRANDS = frozenset((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs"))
_CONTAINER_BRANDS = frozenset((b"mif1", b"msf1", b"miaf"))
_TEXT_HEAD = 1024


def picture_format(data: bytes) -> str:
    """Returns the name of a picture's format, in SERVED or not; "" for an unknown format."""
    for start, name in _STARTS:
        if data.startswith(start):
            return name
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp":
        return _format_of_brands(data)
    head = data[:_TEXT_HEAD].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return "SVG" if head.startswith((b"<svg", b"<?xml", b"<!doctype svg")) and b"<svg" in head else ""


def _format_of_brands(data: bytes) -> str:
    """Returns the format that an ISO container's brands name: a major brand, four bytes of version, other brands."""
    end = min(int.from_bytes(data[:4]), _TEXT_HEAD)
    brands = {data[8:12], *(data[place : place + 4] for place in range(16, end, 4))}
    if brands & _AVIF_BRANDS:
        return "AVIF"
    return "HEIC" if brands & (_HEIC_BRANDS | _CONTAINER_BRANDS) else ""


def _advice(data: bytes, name: str) -> str:
    if not data:
        return "no data"
    if name:
        return f"{name} is not supported: convert the image to JPEG or PNG"
    return f"unknown format: want {', '.join(SERVED[:-1])} or {SERVED[-1]}"


IMAGE = "image"
AUDIO = "audio"


def media_kind(data: bytes) -> str:
    """Returns IMAGE, AUDIO, or "" for bytes that are neither. IMAGE includes formats that are not in SERVED, so that
    a refusal can name the format."""
    if data.startswith((b"ID3", b"fLaC", b"OggS")) or (data.startswith(b"RIFF") and data[8:12] == b"WAVE"):
        return AUDIO
    if picture_format(data):
        return IMAGE
    return AUDIO if is_mpeg(data) else ""


def is_mpeg(data: bytes) -> bool:
    """Returns True if `data` begins with the sync bits of an MPEG frame and a valid version of MPEG."""
    word = int.from_bytes(data[:2])
    return word & 0xFFE0 == 0xFFE0 and word & 0x0018 != 0x0008


_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
_ORIENTATION = 0x0112
_SHORT = 3
_ENTRY_BYTES = 12


def orientation_of(exif: bytes, parts: Parts) -> int:
    """Returns the orientation, 1 to 8, from a block of EXIF with or without its `Exif` prefix. Returns 1 for a damaged
    block, or once `parts` ends. Raises nothing: a picture with damaged EXIF can still be decoded."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = _ORDERS.get(tiff[:4])
    if order is None:
        return UPRIGHT

    def number(place: int, size: int) -> int:
        return int.from_bytes(tiff[place : place + size], order)

    directory = number(4, 4)
    first = directory + 2
    entries = range(first, first + number(directory, 2) * _ENTRY_BYTES, _ENTRY_BYTES)
    for entry, _ in zip(entries, parts, strict=False):
        if entry + _ENTRY_BYTES > len(tiff):
            break
        if number(entry, 2) == _ORIENTATION:
            found = number(entry + 8, 2)
            return found if number(entry + 2, 2) == _SHORT and 1 <= found <= 8 else UPRIGHT
    return UPRIGHT


def _png(data: bytes, parts: Parts) -> PictureHeader:
    width, height = struct.unpack_from(">II", data, 16)
    kept, exif, place = [(0, 8)], (0, 0), 8
    for _ in parts:
        length, kind = struct.unpack_from(">I4s", data, place)
        if kind == b"IDAT":
            orientation = orientation_of(data[slice(*exif)], parts)
            return PictureHeader("PNG", width, height, orientation, (*kept, (place, len(data))))
        if kind == b"IEND" or (place == 8) != (kind == b"IHDR"):
            raise damaged("PNG", "its chunks are not in order")
        following = place + 12 + length
        if kind == b"eXIf":
            exif = place + 8, following - 4
        elif kind in (b"IHDR", b"PLTE", b"tRNS", b"acTL", b"fcTL"):  # acTL and fcTL count an animation's frames
            kept.append((place, following))
        place = following
    raise _crowded("PNG")


def _jpeg(data: bytes, parts: Parts) -> PictureHeader:
    kept, exif, size, tables, fill, place = [(0, 2)], b"", (0, 0), 0, 0, 2
    for _ in parts:
        found = _MARKER.search(data, place, place + 2 + _MOST_FILL_BYTES - fill)
        if found is None:
            break
        fill += found.start() - place
        start, place, marker = found.start(), found.end(), found[1][0]
        if 0xD0 <= marker <= 0xD8 or marker == 0x01:  # a marker without a segment
            continue
        if marker == 0xDA:
            return PictureHeader("JPEG", *size, orientation_of(exif, parts), (*kept, (start, len(data))))
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


def _gif(data: bytes, parts: Parts) -> PictureHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    kept = [(0, place)]
    for _ in parts:
        start, kind = place, data[place]
        if kind == 0x2C:
            x, y, columns, rows = struct.unpack_from("<HHHH", data, place + 1)
            return PictureHeader(
                "GIF", max(width, x + columns), max(height, y + rows), UPRIGHT, (*kept, (place, len(data)))
            )
        if kind == 0x3B:
            raise damaged("GIF", "it ends before its first frame")
        place += 1
        if kind != 0x21:
            continue
        place += 1
        for _ in parts:
            if not data[place]:
                break
            place += data[place] + 1
        place += 1
        if data[start + 1] == 0xF9:  # the extension that names the transparent colour
            kept.append((start, place))
    raise _crowded("GIF")


def _webp(data: bytes, parts: Parts) -> PictureHeader:
    kind, flags = data[12:16], data[20]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return PictureHeader(
            "WebP", width, height, orientation_of(_webp_exif(data, parts), parts) if flags & 0x08 else UPRIGHT
        )
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return PictureHeader("WebP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind != b"VP8 " or data[23:26] != b"\x9d\x01\x2a":
        raise damaged("WebP", "it does not begin with a picture")
    width, height = struct.unpack_from("<HH", data, 26)
    return PictureHeader("WebP", width & 0x3FFF, height & 0x3FFF)


def _webp_exif(data: bytes, parts: Parts) -> bytes:
    place = 12
    for _ in parts:
        if place + 8 > len(data):
            return b""
        kind, length = struct.unpack_from("<4sI", data, place)
        if kind == b"EXIF":
            return data[place + 8 : place + 8 + length]
        place += 8 + length + length % 2
    raise _crowded("WebP")


def _bmp(data: bytes, _parts: Parts) -> PictureHeader:
    if struct.unpack_from("<I", data, 14) == (12,):
        return PictureHeader("BMP", *struct.unpack_from("<HH", data, 18))
    width, height = struct.unpack_from("<Ii", data, 18)
    return PictureHeader("BMP", width, abs(height))


_TURNS = {
    (0, None): UPRIGHT,
    (0, 0): 4,
    (0, 1): 2,
    (1, None): 8,
    (1, 0): 5,
    (1, 1): 7,
    (2, None): 3,
    (2, 0): 2,
    (2, 1): 4,
    (3, None): 6,
    (3, 0): 7,
    (3, 1): 5,
}
"""(Quarter turns to the left, axis of the mirroring after the turns, if any) -> EXIF's orientation number."""
Span = tuple[int, int]


def _avif(data: bytes, parts: Parts) -> PictureHeader:
    """Returns the header of an AVIF, from the properties of its primary item or from its first track."""
    for kind, (start, stop) in _boxes(data, (0, len(data)), parts):
        if kind == b"meta":
            return _item(data, (start + 4, stop), parts)
        if kind == b"moov":
            return _track(data, (start, stop), parts)
    raise damaged("AVIF", "it has neither an item nor a track")


def _track(data: bytes, movie: Span, parts: Parts) -> PictureHeader:
    for kind, span in _boxes(data, movie, parts):
        header = dict(_boxes(data, span, parts)).get(b"tkhd") if kind == b"trak" else None
        if header is not None:
            width, height = struct.unpack_from(">II", data, header[1] - 8)  # both with 16 bits after the point
            return PictureHeader("AVIF", width >> 16, height >> 16)
    raise damaged("AVIF", "it has no track")


def _item(data: bytes, meta: Span, parts: Parts) -> PictureHeader:
    found = dict(_boxes(data, meta, parts))
    properties = dict(_boxes(data, found.get(b"iprp", (0, 0)), parts))
    if b"pitm" not in found or not {b"ipco", b"ipma"} <= properties.keys():
        raise damaged("AVIF", "it does not say which item is the picture, or how large it is")
    at = found[b"pitm"][0]
    (primary,) = struct.unpack_from(">I" if data[at] else ">H", data, at + 4)
    listed = list(_boxes(data, properties[b"ipco"], parts))
    size, turns, mirror = (0, 0), 0, None
    for index in _indices(data, properties[b"ipma"][0], primary, parts):
        kind, (at, _) = listed[index - 1]
        if kind == b"ispe":
            size = struct.unpack_from(">II", data, at + 4)
        elif kind == b"irot":
            turns = data[at] & 3
        elif kind == b"imir":
            mirror = data[at] & 1
    return PictureHeader("AVIF", *size, _TURNS[turns, mirror])


def _indices(data: bytes, at: int, item: int, parts: Parts) -> list[int]:
    """Returns the indices, from 1 on, of an item's properties. `at` is where the contents of `ipma` begin."""
    wide_item, wide_index = data[at] > 0, data[at + 3] & 1
    (count,) = struct.unpack_from(">I", data, at + 4)
    at += 8
    for seen, _ in enumerate(parts):
        if seen == count:
            return []
        number, indices = struct.unpack_from(">IB" if wide_item else ">HB", data, at)
        at += 5 if wide_item else 3
        if number == item:
            found = struct.unpack_from(f">{indices}{'H' if wide_index else 'B'}", data, at)
            mask = 0x7FFF if wide_index else 0x7F
            return [each & mask for each in found if each & mask]
        at += indices * (2 if wide_index else 1)
    raise _crowded("AVIF")


def _boxes(data: bytes, span: Span, parts: Parts) -> Iterator[tuple[bytes, Span]]:
    """Yields the kind of each box in a part of a file, and the start and end of the box's contents."""
    place, end = span
    for _ in parts:
        if place + 8 > end:
            return
        size, kind = struct.unpack_from(">I4s", data, place)
        start = place + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start)
            start += 8
        following = place + size if size else end
        if following < start:
            raise damaged("AVIF", "a box is shorter than its own header")
        yield kind, (start, min(following, end))
        place = following
    raise _crowded("AVIF")


_WALKS: dict[str, Callable[[bytes, Parts], PictureHeader]] = {
    "PNG": _png,
    "JPEG": _jpeg,
    "GIF": _gif,
    "WebP": _webp,
    "BMP": _bmp,
    "AVIF": _avif,
}
