"""Bytes to text while the bytes are still arriving, with the rules of a Go host (docs/internals/wire.md, 5)."""

import codecs
from typing import Final

_ONE_PER_BYTE: Final = "runner-one-replacement-per-byte"
_ZERO_WIDTH_JOINER: Final = "\u200d"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Go reads every byte of a broken sequence as one U+FFFD; Python's own "replace" merges them into one."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_ONE_PER_BYTE, _replace_each_byte)


def decode(data: bytes) -> str:
    """Decode `data` on its own: one U+FFFD for every byte that is not part of a complete, valid sequence."""
    return data.decode("utf-8", _ONE_PER_BYTE)


class Utf8Stream:
    """One generation's bytes to text. Owned by whoever decodes that generation; holds at most three bytes."""

    def __init__(self) -> None:
        self._pending = b""
        self._last = ""

    def feed(self, data: bytes) -> str:
        """Append `data`; return the longest prefix of what is held that has no incomplete end.

        A byte that can never become valid comes out at once as U+FFFD, one for each byte. An incomplete sequence
        that may still become valid is held back.
        """
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, _ONE_PER_BYTE, False)
        self._pending = data[used:]
        if self._pending[:1] == b"\xed" and self._pending[1:] >= b"\xa0":
            # Python waits for the third byte of a surrogate, which then fails; Go knows it from the second one.
            text += "\ufffd" * len(self._pending)
            self._pending = b""
        if text:
            self._last = text[-1]
        return text

    def finish(self) -> str:
        """End the stream and return what its held tail is worth: `""`, or one U+FFFD.

        Ollama's own runner drops the tail, and so do we: the character has not begun on the screen, nothing is
        missed. The exception is a tail behind a zero width joiner. There the reader already sees the beginning of a
        joined character (a family, a flag), so one U+FFFD says that it was broken off: one for the whole tail, because
        it would have been one character.
        """
        broken, self._pending = self._pending, b""
        return "\ufffd" if broken and self._last == _ZERO_WIDTH_JOINER else ""
