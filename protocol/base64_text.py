"""Base64 that is decoded while it arrives, so that a picture is never held in both forms."""

from binascii import a2b_base64

from protocol.golang import BadRequestError

_QUANTUM = 4  # characters that stand for three bytes


class Base64Text:
    """The text of one value, in parts."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._tail = b""  # the last characters: only they may be padded

    def take(self, text: str) -> int:
        """Takes the next part, and returns the number of bytes that it added. Ignores line ends; raises BadRequestError
        for anything else that is no base64."""
        coded = self._tail + text.replace("\r", "").replace("\n", "").encode()
        cut = max(0, len(coded) - (len(coded) % _QUANTUM or _QUANTUM))
        head, self._tail = coded[:cut], coded[cut:]
        if b"=" in head:
            raise BadRequestError("base64: padding before the end")
        decoded = _decoded(head)
        self._bytes += decoded
        return len(decoded)

    def finish(self) -> bytes:
        """Returns all bytes. Raises BadRequestError."""
        self._bytes += _decoded(self._tail)
        self._tail = b""
        return bytes(self._bytes)


def _decoded(coded: bytes) -> bytes:
    try:
        return a2b_base64(coded, strict_mode=True)
    except ValueError as error:
        raise BadRequestError(f"base64: {error}") from None
