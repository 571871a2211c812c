"""Bytes to header, and bytes to pixels, with Pillow. The only module of this package that imports it; and numpy, which
takes much longer, once there is a picture to decode.

Formats are chosen by their first bytes, and their decoders called by name: Pillow's search would try 44 formats, one of
which starts a program. Rows made of the pixels equal those of transformers' processors for Pillow bit for bit, so a
JPEG is always decoded in full and never at a fraction of its size.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, TypeAlias

from PIL import AvifImagePlugin, Image
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from runner.errors import MediaError
from runner.media.alpha import Alpha
from runner.media.formats import served_format
from runner.media.header import MAX_PIXELS, Header
from runner.media.orientation import UPRIGHT, orientation_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pixels: TypeAlias = "npt.NDArray[np.uint8]"
"""uint8 [height, width, 3]: red, green, blue."""

# Set once, for the whole process.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow refuses twice as many: a second line of defence, before it allocates
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # not one for each core: the caller bounds how many pictures are decoded
warnings.filterwarnings("ignore", module=r"PIL\.")  # of damaged EXIF, and of pictures above half of the limit

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
"""Orientation -> what makes the stored pixels upright."""
_SIDEWAYS = 5
"""From this orientation on, width and height change places."""
_SIXTEEN_BIT = ("I", "I;16", "I;16L", "I;16B", "I;16N")
_TOO_LARGE = f"more than {MAX_PIXELS // 1_000_000} megapixels, which are the most that are decoded"
_LONGEST_REASON = 120


def read_header(data: bytes) -> Header:
    """Returns format and size of a picture without decoding a pixel. Raises MediaError if it will not be decoded."""
    name = served_format(data)
    with _blamed_on_the_picture(name), _READERS[name](BytesIO(data)) as image:
        exif = image.info.get("exif")
        orientation = orientation_of(exif) if isinstance(exif, bytes) else UPRIGHT
        width, height = image.size
    if width * height > MAX_PIXELS:
        raise MediaError(f"decode image: {width} x {height} pixels are {_TOO_LARGE}")
    if orientation >= _SIDEWAYS:
        width, height = height, width
    return Header(name, width, height, orientation)


def decode(data: bytes, header: Header, width: int, height: int, alpha: Alpha = "drop") -> Pixels:
    """Returns the first frame of a picture, upright and resized to `width` x `height`: uint8 [height, width, 3].

    `header` is what `read_header` says of the same bytes. Holds up to 16 bytes (WebP) for each pixel of the
    source for a moment, and releases the GIL while decoding and resizing. Raises MediaError for damaged pictures, and
    MemoryError.
    """
    import numpy as np

    plain = _load(data, header.format, alpha)
    if plain.size != _stored_size(header):
        raise MediaError(f"decode image: damaged {header.format}: its header speaks of another size")
    if header.orientation in _TURNS:
        plain = plain.transpose(_TURNS[header.orientation])
    resized = plain.resize((width, height), Image.Resampling.BICUBIC)
    if resized.mode == "RGBa":
        resized = resized.convert("RGBA") if alpha == "weigh" else Image.merge("RGB", resized.split()[:3])
    return np.array(resized.convert("RGB"))


@contextmanager
def _blamed_on_the_picture(name: str) -> Iterator[None]:
    """Makes a MediaError of whatever a decoder raises, but for want of memory.

    Decoders of files from strangers raise anything, from KeyError to RuntimeError.
    """
    try:
        yield
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise MediaError(f"decode image: {_TOO_LARGE}") from error
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise MediaError(f"decode image: damaged {name}: {lines[0][:_LONGEST_REASON]}") from error


def _load(data: bytes, name: str, alpha: Alpha) -> Image.Image:
    """Decodes the first frame, as it is stored. Returns it in one of the modes of `_plain`."""
    with _blamed_on_the_picture(name), _READERS[name](BytesIO(data)) as image:
        image.load()
        return _plain(image, alpha)


def _stored_size(header: Header) -> tuple[int, int]:
    """Returns width and height before the orientation was applied."""
    sideways = header.orientation >= _SIDEWAYS
    return (header.height, header.width) if sideways else (header.width, header.height)


def _plain(image: Image.Image, alpha: Alpha) -> Image.Image:
    """Returns the picture in one of the modes L, RGB, and RGBa (colours multiplied by opacity).

    Grey stays one channel, which resizes to the same values as three equal ones.
    """
    if image.mode in _SIXTEEN_BIT:
        import numpy as np

        # Pillow would clip all but the darkest 256 levels to white.
        return Image.fromarray((np.clip(np.asarray(image), 0, 0xFFFF) >> 8).astype(np.uint8))
    transparency = image.info.pop("transparency", None)
    if alpha != "drop" and (transparency is not None or image.mode in ("RGBA", "LA", "PA")):
        if transparency is not None:
            image.info["transparency"] = transparency
        return (image if image.mode == "RGBA" else image.convert("RGBA")).convert("RGBa")
    return image if image.mode == "RGB" else image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
