"""Base64 that is decoded while it arrives, so that a picture is never held in both forms."""

import re
from binascii import a2b_base64

from protocol.refusal import BadRequestError, shown

_QUANTUM = 4  # characters that stand for three bytes
_LETTERS = re.compile(r"[A-Za-z0-9+/]*+")


class Base64Text:
    """The text of one value, in parts."""

    def __init__(self, place: str) -> None:
        """`place` names the value in refusals."""
        self._place = place
        self._is_url = False
        self._taken = 0  # characters, without line ends
        self._bytes = bytearray()
        self._tail = ""  # the last characters: only they may be padded

    def take(self, text: str) -> int:
        """Takes the next part, and returns the number of bytes that it added. Ignores line ends. Raises BadRequestError
        for other characters that are not base64."""
        coded = self._tail + text.replace("\r", "").replace("\n", "")
        self._is_url |= not self._taken and coded.startswith("data:")
        cut = max(0, len(coded) - (len(coded) % _QUANTUM or _QUANTUM))
        head, self._tail = coded[:cut], coded[cut:]
        if "=" in head:
            raise self._refusal(head)
        return self._decode(head)

    def finish(self) -> bytes:
        """Returns all bytes. Raises BadRequestError for an incomplete text."""
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
