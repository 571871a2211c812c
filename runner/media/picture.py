"""Decodes the bytes of a picture to pixels, with Pillow. Only processes that decode import this module.

Calls each format's decoder by name: Pillow's own search would try 44 formats, one of which starts a program. Rows made
of the pixels must equal those of transformers' processors bit for bit, so a JPEG is always decoded in full size.
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

Image.MAX_IMAGE_PIXELS = None  # `read_picture_header` has checked their number
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
"""The upper byte of each 16-bit level. Pillow's own conversion would make all but the darkest 256 levels white."""
MOST_SCANS = 100
"""The most scans of a progressive JPEG. Each scan passes over all pixels; encoders write about ten scans."""
_MARKER = re.compile(rb"\xff([^\xff\0\x01\xd0-\xd8])", re.DOTALL)
"""Matches a marker at which a decoder stops. FF 0 is pixel data; the markers 1 and D0 to D8 are passed over."""
_LONG = {*range(0xC0, 0xD0), *range(0xDA, 0xDE), *range(0xE0, 0xF0), 0xFE} - {0xC8}
"""The markers whose segments begin with their length."""


def decode_picture(data: bytes, header: PictureHeader, width: int, height: int, alpha: Alpha = "drop") -> Image.Image:
    """Returns the first frame of a picture, upright and resized to `width` x `height`, in the mode RGB.

    `header` must be the header of `data`. Raises MediaError for a damaged picture, and MemoryError.
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
    except Exception as error:  # decoders raise errors of any type, KeyError among them, in words for programmers
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
    """Returns the error that refuses a picture, for an exception that its decoder raised."""
    text = str(error)
    if text.startswith("Unsupported "):
        return MediaError(f"decode image: {text}: convert the image to PNG")
    cut_off = isinstance(error, struct.error | IndexError | EOFError) or "truncated" in text.lower()
    return damaged(name, "the file ends too early" if cut_off else "its contents cannot be decoded")


def _count_scans(data: bytes) -> None:
    """Raises MediaError for a JPEG of more than MOST_SCANS scans, or more than MOST_PARTS parts before its end.

    Goes from marker to marker and skips whole segments, as a decoder does.
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

    A grey picture stays in one channel: resizing gives the same values as with three equal channels.
    """
    if image.mode in _SIXTEEN_BIT:
        return image.convert("I").point(_UPPER_BYTES, "L")
    transparency = image.info.pop("transparency", None)
    if alpha != "drop" and (transparency is not None or image.mode in ("RGBA", "LA", "PA")):
        if transparency is not None:
            image.info["transparency"] = transparency
        return (image if image.mode == "RGBA" else image.convert("RGBA")).convert("RGBa")
    return image if image.mode == "RGB" else image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
