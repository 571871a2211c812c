"""Decodes UTF-8 by the rules of a Go host (docs/internals/wire.md, 5)."""

import codecs
from typing import Final

ONE_PER_BYTE: Final = "runner-one-replacement-per-byte"
_ZERO_WIDTH_JOINER: Final = "\u200d"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Replaces every byte of an invalid sequence by U+FFFD, as Go does. Python's "replace" gives one for the
    sequence."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(ONE_PER_BYTE, _replace_each_byte)


def decode_utf8(data: bytes) -> str:
    """Decodes `data`. Every byte outside of complete, valid sequences becomes one U+FFFD."""
    return data.decode("utf-8", ONE_PER_BYTE)


class Utf8Stream:
    """The incremental decoder of one generation. Holds at most three bytes. Owner: the generation."""

    def __init__(self) -> None:
        self._pending = b""
        self._last = ""

    def feed(self, data: bytes) -> str:
        """Returns the text of the held bytes and `data`, up to an incomplete sequence at the end. Each byte that can
        never become valid is replaced by one U+FFFD immediately. A sequence that may become valid is held."""
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, ONE_PER_BYTE, False)
        self._pending = data[used:]
        if self._pending[:1] == b"\xed" and self._pending[1:] >= b"\xa0":
            # Python rejects a surrogate at its third byte, Go at its second.
            text += "\ufffd" * len(self._pending)
            self._pending = b""
        if text:
            self._last = text[-1]
        return text

    def finish(self) -> str:
        """Ends the stream. Returns the text for the held bytes: an empty text or one U+FFFD.

        An incomplete character is dropped, as in Ollama's own runner: the reader has seen nothing of this character.
        The exception is an incomplete character after a zero width joiner: the reader has seen the beginning of the
        joined character (a family, a flag), and one U+FFFD shows that the rest is missing.
        """
        broken, self._pending = self._pending, b""
        return "\ufffd" if broken and self._last == _ZERO_WIDTH_JOINER else ""
