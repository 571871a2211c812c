"""Pictures of one colour, without a library for pictures."""

import struct
import zlib

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_EIGHT_BIT_RGB = bytes([8, 2, 0, 0, 0])


def png(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    """Returns a PNG; the parts of `colour` are red, green and blue, 0 to 255."""
    row = b"\0" + bytes(colour) * width
    return png_file(struct.pack(">II", width, height) + _EIGHT_BIT_RGB, zlib.compress(row * height))


def png_file(head: bytes, packed: bytes) -> bytes:
    """Returns a PNG of a header and packed rows."""
    return _SIGNATURE + _chunk(b"IHDR", head) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
