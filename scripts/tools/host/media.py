"""Pictures and sounds of users' requests: kinds by their first bytes, and the markers that stand for them.

See docs/internals/wire.md, 2.9.
"""

import base64
import binascii
from collections.abc import Iterable

from scripts.tools.host.go_json import RefusedError
from scripts.tools.host.lib import Medium

_IMAGES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"\0\0\1\0", b"\0\0\2\0")
"""The beginnings of PNG, JPEG, GIF, BMP and icons."""
_PLACE = "[img]"
"""A user may write this where a picture belongs."""


def media_of(images: object) -> list[Medium]:
    """Returns the media that a request has in base64. Raises `RefusedError`."""
    if images is None:
        return []
    if not isinstance(images, list):
        raise RefusedError(400, "json: cannot unmarshal images: an array is wanted")
    try:
        found = [base64.b64decode(image, validate=True) for image in images]
    except (TypeError, ValueError, binascii.Error) as error:
        raise RefusedError(400, f"illegal base64 data in images: {error}") from error
    return [Medium(data, kind_of(data)) for data in found]


def kind_of(data: bytes) -> str:
    """Returns `image`, `audio`, or "" for bytes that the host does not know: HEIC, AVIF, TIFF, damaged beginnings."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "audio"
    if data.startswith(b"ID3") or (data[:1] == b"\xff" and data[1:2] >= b"\xe0"):
        return "audio"
    is_webp = data[:4] == b"RIFF" and data[8:14] == b"WEBPVP"
    return "image" if is_webp or data.startswith(_IMAGES) else ""


def marked(text: str, numbers: Iterable[int], *, built_in: bool) -> str:
    """Returns the text of a message with a marker for each of its media: in place of `[img]`, else in front.

    `built_in`: the host renders the model's chats with code of its own, not with a template. That puts a space behind
    the markers, and leaves alone a message that has some already.
    """
    if built_in and "[img-" in text:
        return text
    front = ""
    for number in numbers:
        marker = f"[img-{number}]"
        if _PLACE in text:
            text = text.replace(_PLACE, marker, 1)
        else:
            front += marker
    space = " " if built_in and front and text[:1].strip() else ""
    return f"{front}{space}{text}"
