"""Bytes to pixels, with Pillow. The only module that imports it, in a process of its own.

Calls decoders by name: Pillow's search would try 44 formats, one of which starts a program. Rows made of the pixels
equal those of transformers' processors for Pillow bit for bit, so a JPEG is never decoded at a fraction of its size.
"""

import re
import struct
from collections.abc import Callable
from io import BytesIO

from PIL import AvifImagePlugin, Image
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from runner.errors import MediaError
from runner.media.geometry import Alpha
from runner.media.header import MOST_PARTS, PictureHeader, damaged

Image.MAX_IMAGE_PIXELS = None  # the walk over the header has checked them
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # one picture is decoded at a time, on one core

_READERS: dict[str, Callable[[BytesIO], ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "GIF": GifImageFile,
    "WebP": WebPImageFile,
    "BMP": BmpImageFile,
    "AVIF": AvifImageFile,
}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Orientation -> the operation that makes the stored pixels upright."""
_SIXTEEN_BIT = ("I", "I;16", "I;16L", "I;16B", "I;16N")
_UPPER_BYTES = [level >> 8 for level in range(1 << 16)]
"""Pillow's own conversion would clip all but the darkest 256 levels to white."""
MOST_SCANS = 100
"""The most scans of a progressive JPEG, each over all pixels. Encoders write about ten."""
_MARKER = re.compile(rb"\xff([^\xff\0\x01\xd0-\xd8])", re.DOTALL)
"""A marker at which a decoder stops. Among pixels 0 follows an FF that begins no marker; 1 and D0 to D8 stand alone."""
_LONG = {*range(0xC0, 0xD0), *range(0xDA, 0xDE), *range(0xE0, 0xF0), 0xFE} - {0xC8}
"""Markers of segments with a length."""


def decode_picture(data: bytes, header: PictureHeader, width: int, height: int, alpha: Alpha = "drop") -> Image.Image:
    """Returns the first frame of a picture, upright and resized to `width` x `height`, in the mode RGB.

    `header` is the header of the same bytes. Raises MediaError for a damaged picture, and MemoryError.
    """
    data = b"".join(header.pieces(data))
    if header.format == "JPEG":
        _count_scans(data)
    try:
        with _READERS[header.format](BytesIO(data)) as image:
            image.load()
            plain = _plain(image, alpha)
    except (MemoryError, MediaError):
        raise
    except Exception as error:  # decoders raise anything, from KeyError to RuntimeError, in words for programmers
        raise _refusal(header.format, error) from error
    if plain.size != header.stored_size:
        raise damaged(header.format, "its pixels have another size than its header")
    if header.orientation in _TURNS:
        plain = plain.transpose(_TURNS[header.orientation])
    resized = plain.resize((width, height), Image.Resampling.BICUBIC)
    if resized.mode == "RGBa":
        resized = resized.convert("RGBA") if alpha == "weigh" else Image.merge("RGB", resized.split()[:3])
    return resized.convert("RGB")


def _refusal(name: str, error: Exception) -> MediaError:
    """Returns the refusal for an exception of a decoder."""
    text = str(error)
    if text.startswith("Unsupported "):
        return MediaError(f"decode image: {text}: convert the image to PNG")
    cut_off = isinstance(error, struct.error | IndexError | EOFError) or "truncated" in text.lower()
    return damaged(name, "the file ends too early" if cut_off else "its contents cannot be decoded")


def _count_scans(data: bytes) -> None:
    """Raises MediaError for a JPEG of more than MOST_SCANS scans, or more than MOST_PARTS parts before its end.

    Walks from marker to marker as a decoder does, over whole segments.
    """
    place, scans = 0, 0
    for _ in range(MOST_PARTS):
        found = _MARKER.search(data, place)
        if found is None or found[1] == b"\xd9":
            return
        place, marker = found.end(), found[1][0]
        scans += marker == 0xDA
        if scans > MOST_SCANS:
            raise damaged("JPEG", f"it has more than {MOST_SCANS} scans")
        if marker in _LONG:
            place += max(2, int.from_bytes(data[place : place + 2]))
    raise damaged("JPEG", f"it has more than {MOST_PARTS} parts")


def _plain(image: Image.Image, alpha: Alpha) -> Image.Image:
    """Returns the picture in one of the modes L, RGB, and RGBa (colours multiplied by opacity).

    Grey stays one channel, which resizes to the same values as three equal ones.
    """
    if image.mode in _SIXTEEN_BIT:
        return image.convert("I").point(_UPPER_BYTES, "L")
    transparency = image.info.pop("transparency", None)
    if alpha != "drop" and (transparency is not None or image.mode in ("RGBA", "LA", "PA")):
        if transparency is not None:
            image.info["transparency"] = transparency
        return (image if image.mode == "RGBA" else image.convert("RGBA")).convert("RGBa")
    return image if image.mode == "RGB" else image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
