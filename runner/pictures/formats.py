"""The format of a picture, by its first bytes alone."""

from runner.errors import MediaError

SERVED = ("PNG", "JPEG", "GIF", "WebP", "BMP", "AVIF")
"""Formats whose decoders are inside every wheel of Pillow. None of them starts a program or opens another file."""

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


def format_of(data: bytes) -> str:
    """Returns the name of the picture's format, be it served or not; "" for bytes that are no picture known here."""
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
    """Reads the brands of an ISO container: the major one, four bytes of version, then the compatible ones."""
    end = min(int.from_bytes(data[:4]), _TEXT_HEAD)
    brands = {data[8:12], *(data[place : place + 4] for place in range(16, end, 4))}
    if brands & _AVIF_BRANDS:
        return "AVIF"
    return "HEIC" if brands & (_HEIC_BRANDS | _CONTAINER_BRANDS) else ""


def served_format(data: bytes) -> str:
    """Returns the picture's format, one of SERVED. Raises MediaError for all other bytes, with advice."""
    found = format_of(data)
    if found in SERVED:
        return found
    if not data:
        raise MediaError("decode image: no data")
    if found:
        raise MediaError(f"decode image: {found} is not supported: convert the image to JPEG or PNG")
    raise MediaError(f"decode image: unknown format: want {', '.join(SERVED[:-1])} or {SERVED[-1]}")


# --- The kinds of media, and a look at bytes whose kind the host did not know.

IMAGE = "image"
AUDIO = "audio"

_MPEG_SYNC = 0xFFE0
_MPEG_RESERVED = 0x0018  # this version of MPEG does not exist


def kind_of(data: bytes) -> str:
    """Returns IMAGE, AUDIO, or "" for bytes that are neither.

    Pictures of formats that are not served count as pictures, so that the refusal can name the format.
    """
    if data.startswith(b"ID3") or (data.startswith(b"RIFF") and data[8:12] == b"WAVE"):
        return AUDIO
    if format_of(data):
        return IMAGE
    word = int.from_bytes(data[:2])
    return AUDIO if word & _MPEG_SYNC == _MPEG_SYNC and word & _MPEG_RESERVED != 0x0008 else ""
