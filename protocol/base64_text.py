"""Decodes base64 while it arrives, so that memory never holds both the base64 and the bytes of a whole picture."""

import re
from binascii import a2b_base64

from protocol.refusal import BadRequestError, shown

_QUANTUM = 4  # four base64 characters stand for three bytes
_LETTERS = re.compile(r"[A-Za-z0-9+/]*+")


class Base64Text:
    """Decodes the base64 text of one JSON value, which arrives in parts."""

    def __init__(self, place: str) -> None:
        """`place` is the name of the value in error messages, such as `Media[0].data`."""
        self._place = place
        self._is_url = False
        self._taken = 0  # the number of characters decoded so far, without line ends
        self._bytes = bytearray()
        self._tail = ""  # up to four last characters, not decoded yet: only the end of the text may have padding

    def take(self, text: str) -> int:
        """Decodes the next part, and returns the number of bytes decoded. Ignores line ends. Raises BadRequestError for
        any other character that is not base64."""
        coded = self._tail + text.replace("\r", "").replace("\n", "")
        self._is_url |= not self._taken and coded.startswith("data:")
        cut = max(0, len(coded) - (len(coded) % _QUANTUM or _QUANTUM))
        head, self._tail = coded[:cut], coded[cut:]
        if "=" in head:
            raise self._refusal(head)
        return self._decode(head)

    def finish(self) -> bytes:
        """Returns the bytes of the whole text. Raises BadRequestError if the text is incomplete."""
        self._decode(self._tail)
        self._tail = ""
        return bytes(self._bytes)

    def _decode(self, coded: str) -> int:
        try:
            data = a2b_base64(coded, strict_mode=True)
        except ValueError:
            raise self._refusal(coded) from None
        self._taken += len(coded)
        self._bytes += data
        return len(data)

    def _refusal(self, coded: str) -> BadRequestError:
        if self._is_url:
            return BadRequestError(f'{self._place} is a data URL: send only what follows "base64,"')
        letters = _LETTERS.match(coded)
        at = letters.end() if letters is not None else 0
        found = shown(coded[at]) if at < len(coded) else "its end"
        wanted = "A-Z, a-z, 0-9, + and /, and = up to a multiple of four"
        return BadRequestError(
            f"{self._place} is not base64: found {found} after {self._taken + at} characters, want {wanted}"
        )
