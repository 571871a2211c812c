"""The kinds of media, and a look at bytes whose kind the host did not know."""

from runner.media.formats import format_of

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
