"""Pictures that tests make on the spot."""

import struct
import zlib
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from PIL import Image

from runner.media import picture, sound
from runner.media.decode_process import DecodeProcess
from runner.media.geometry import Alpha, Geometry, Pixels
from runner.media.header import PictureHeader, read_picture_header
from runner.media.prompt import MediaPrompt, Span
from runner.media.sound_header import SoundHeader

if TYPE_CHECKING:
    from runner.engine.request import Request


def pattern(width: int, height: int) -> Pixels:
    """Colours without a pattern that a wrong layout, a turn or another filter would leave as it is: whole numbers only,
    so that each machine makes the same."""
    y, x, channel = (axis.astype(np.int32) for axis in np.ogrid[:height, :width, :3])
    values: npt.NDArray[np.int32] = x * x * 3 + y * y * 5 + x * y * 7 + channel * 85 + (x // 17) * (y // 13) * 11
    return (values % 256).astype(np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    """The bytes of a picture in Pillow's format `form`."""
    stream = BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def smooth(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture that formats which lose something keep nearly as it is."""
    y, x = np.ogrid[:height, :width]
    red, green = x * 255 // max(1, width - 1) + 0 * y, y * 255 // max(1, height - 1) + 0 * x
    return Image.fromarray(np.dstack((red, green, 255 - red)).astype(np.uint8)).convert(mode)


class Form(NamedTuple):
    """One way to write a picture: Pillow's name of the format, and options."""

    pillow: str
    options: dict[str, object]
    lossless: bool


FORMS = {
    "png": Form("PNG", {}, True),
    "jpeg": Form("JPEG", {"quality": 95, "subsampling": 0}, False),
    "jpeg-progressive": Form("JPEG", {"quality": 95, "subsampling": 0, "progressive": True}, False),
    "gif": Form("GIF", {}, False),
    "webp": Form("WEBP", {"quality": 95}, False),
    "webp-lossless": Form("WEBP", {"lossless": True}, True),
    "bmp": Form("BMP", {}, True),
    "avif": Form("AVIF", {"quality": 95, "speed": 10}, False),
}
"""All formats that are served."""


def in_form(name: str, image: Image.Image) -> bytes:
    """The bytes of a picture in one of FORMS."""
    return encoded(image, FORMS[name].pillow, **FORMS[name].options)


def decode(data: bytes, header: PictureHeader, width: int, height: int, alpha: Alpha = "drop") -> Pixels:
    """The pixels of a picture at some size."""
    return np.array(picture.decode_picture(data, header, width, height, alpha))


def spans(request: "Request") -> Sequence[Span]:
    """The places of the pictures in a prompt."""
    return () if request.shown is None else cast("MediaPrompt", request.shown).spans


class Here(DecodeProcess):
    """Decodes in this process."""

    def decode_picture(
        self, data: bytes, header: PictureHeader, geometry: Geometry, alpha: Alpha, left: Callable[[], bool]
    ) -> bytes:
        return picture.decode_picture(data, header, geometry.width, geometry.height, alpha).tobytes()

    def decode_sound(
        self, data: bytes, header: SoundHeader, frame_samples: int, left: Callable[[], bool]
    ) -> tuple[list[int], bytes]:
        lengths, rows = sound.decode_sound(data[header.start : header.stop], header, frame_samples)
        return lengths, rows.tobytes()


def seen(data: bytes, alpha: Alpha = "drop") -> Pixels:
    """The pixels of a picture at its own size."""
    header = read_picture_header(data)
    return decode(data, header, header.width, header.height, alpha)


def png_chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_of_size(width: int, height: int) -> bytes:
    """A small PNG that claims a size; its pixels are 3 KB of packed zeros."""
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(3_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")
