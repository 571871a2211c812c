"""The size and the orientation of an AVIF: from the properties of its primary item, or from its first track."""

import struct
from collections.abc import Iterator

from runner.errors import MediaError
from runner.media.orientation import UPRIGHT

_MOST_BOXES = 4096
"""In one box, and the most items whose properties are listed. A picture of 100 megapixels has some hundred tiles."""
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
"""Quarter turns to the left, and the axis of the mirror after them -> EXIF's number."""
Span = tuple[int, int]


def avif_size(data: bytes) -> tuple[int, int, int]:
    """Returns width and height as stored, and the orientation. Raises MediaError, struct.error or IndexError."""
    for kind, (start, stop) in _boxes(data, (0, len(data))):
        if kind == b"meta":
            return _item(data, (start + 4, stop))
        if kind == b"moov":
            return _track(data, (start, stop))
    raise _damaged("it has neither an item nor a track")


def _track(data: bytes, movie: Span) -> tuple[int, int, int]:
    for kind, span in _boxes(data, movie):
        header = dict(_boxes(data, span)).get(b"tkhd") if kind == b"trak" else None
        if header is not None:
            width, height = struct.unpack_from(">II", data, header[1] - 8)  # with 16 bits behind the point
            return width >> 16, height >> 16, UPRIGHT
    raise _damaged("it has no track")


def _item(data: bytes, meta: Span) -> tuple[int, int, int]:
    found = dict(_boxes(data, meta))
    properties = dict(_boxes(data, found.get(b"iprp", (0, 0))))
    if b"pitm" not in found or not {b"ipco", b"ipma"} <= properties.keys():
        raise _damaged("it does not say which item is the picture, or how large it is")
    at = found[b"pitm"][0]
    (primary,) = struct.unpack_from(">I" if data[at] else ">H", data, at + 4)
    listed = list(_boxes(data, properties[b"ipco"]))
    size, turns, mirror = (0, 0), 0, None
    for index in _indices(data, properties[b"ipma"][0], primary):
        kind, (at, _) = listed[index - 1]
        if kind == b"ispe":
            size = struct.unpack_from(">II", data, at + 4)
        elif kind == b"irot":
            turns = data[at] & 3
        elif kind == b"imir":
            mirror = data[at] & 1
    return *size, _TURNS[turns, mirror]


def _indices(data: bytes, at: int, item: int) -> list[int]:
    """Returns the numbers, from 1 on, of an item's properties."""
    wide_item, wide_index = data[at] > 0, data[at + 3] & 1
    (count,) = struct.unpack_from(">I", data, at + 4)
    at += 8
    if count > _MOST_BOXES:
        raise _damaged(f"it has more than {_MOST_BOXES} items")
    for _ in range(count):
        number, indices = struct.unpack_from(">IB" if wide_item else ">HB", data, at)
        at += 5 if wide_item else 3
        if number == item:
            found = struct.unpack_from(f">{indices}{'H' if wide_index else 'B'}", data, at)
            mask = 0x7FFF if wide_index else 0x7F
            return [each & mask for each in found if each & mask]
        at += indices * (2 if wide_index else 1)
    return []


def _boxes(data: bytes, span: Span) -> Iterator[tuple[bytes, Span]]:
    """Yields the kinds of the boxes in a part of a file, and where their contents begin and end."""
    place, end = span
    for number in range(_MOST_BOXES + 1):
        if place + 8 > end:
            return
        if number == _MOST_BOXES:
            raise _damaged(f"it has more than {_MOST_BOXES} boxes in one")
        size, kind = struct.unpack_from(">I4s", data, place)
        start = place + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start)
            start += 8
        following = place + size if size else end
        if following < start:
            raise _damaged("a box is shorter than its own header")
        yield kind, (start, min(following, end))
        place = following


def _damaged(why: str) -> MediaError:
    return MediaError(f"decode image: damaged AVIF: {why}")
