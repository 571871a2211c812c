"""Reads the body of a completion request in pieces as they arrive, so that a large body is never decoded as a whole.

The reader handles long strings while they arrive: it checks them, stores the prompt and the data of media apart, and
drops values of unknown keys. Everything else is called the rest: it is small, and is decoded at the end.
"""

import json
import re
import secrets
from base64 import b64decode
from bisect import bisect_right
from codecs import utf_8_decode
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
from operator import itemgetter
from typing import get_origin

import msgspec

from protocol import golang
from protocol.base64_text import Base64Text
from protocol.refusal import no_json
from protocol.request import CompletionRequest, Media

MOST_MEDIA_BYTES = 128 << 20
"""The most bytes of a body from the first data of media to the end: base64 of 96 MiB. Hosts have no such limit, but a
larger body would take too long."""
MOST_REST_BYTES = 2 << 20
"""The most bytes of the rest. A schema in it may have a megabyte."""
_MOST_MARKS = 1 << 18
"""The most brackets and commas in the rest. Each may belong to a value, and a value takes a hundred bytes of memory."""
_LONG_BYTES = 1 << 12
_MEDIA_DEPTH = 3  # the depth of the members of an object in a list that is a member of the body
_SHIFT_BYTES = 1 << 7  # the memory that a pair in `_shifts` takes, for each long string
_ESCAPE_BYTES = 12  # the bytes of two escapes, which write a character beyond U+FFFF
_TO_THE_END = re.compile(
    rb'[^"\\]*+(?:\\(?:[^u]|u(?![dD][89abAB]..(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z)[0-9a-fA-F]{4})[^"\\]*+)*+', re.DOTALL
)
"""Matches from inside a string to its end or the end of the piece, without an incomplete escape or pair of escapes."""
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[][{},:"]', re.DOTALL)
"""Matches whole strings and punctuation. A quote alone is the start of a string whose end has not arrived."""


class TooLargeError(Exception):
    """The rest of the body is too large. The message names the limits."""


class MediaTooLargeError(Exception):
    """The media of a request are too large. The message has their size."""


class PromptTooLongError(Exception):
    """The prompt is too long for the model. `size` is the number of its bytes, in UTF-8, that have arrived."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class CompletionReader:
    """Reads one body. Owner: the reader of the connection. The time for a piece is proportional to its length."""

    def __init__(self, most_prompt_bytes: int, body_bytes: int = 0) -> None:
        """A prompt of more than `most_prompt_bytes` in UTF-8 is refused. `body_bytes` is the size of the whole body, 0
        if unknown. With it, media that are too large are refused as soon as they begin."""
        self._most_prompt_bytes = most_prompt_bytes
        self._body_bytes = body_bytes
        self._fed_bytes = 0
        self._media_at: int | None = None  # the position in the body of the first data of media, or a little after it
        self._rest = bytearray()
        self._tail = b""  # the incomplete character or escape at the end of the last piece
        self._depth = self._marks = 0
        self._after_colon = False
        self._name = b""  # the key of the current member of the body
        self._item = 0  # the index in the current list
        self._media_name = b""  # the key of the current member of an object in a list
        self._string_at: int | None = None  # the start of the current string in the rest, or None
        self._over = False
        self._long = self._wanted = False  # True if the current string is long; if it is the prompt
        self._prompt: list[bytes] = []
        self._prompt_bytes = 0
        self._data: Base64Text | None = None  # decodes the current string if it is the data of media
        self._media: list[Base64Text] = []
        self._media_bytes = 0
        self._stand_in = secrets.token_hex(16)
        self._end = 0  # the position in the body after the part of a string that `_take` handles
        self._shifts = [(0, 0)]  # positions in the rest, and the bytes of the body left out before each
        self.strangers: list[str] = []
        """The first unknown keys, each with its path. Filled by `finish`."""

    @property
    def held_bytes(self) -> int:
        """The bytes that the reader holds in memory."""
        return len(self._rest) + self._prompt_bytes + self._media_bytes + _SHIFT_BYTES * len(self._shifts)

    def feed(self, piece: bytes) -> int:
        """Reads the next piece, of some ten kilobytes, and returns `held_bytes`.

        Raises:
            BadRequestError: the body is not a request, whatever follows.
            TooLargeError: the rest is too large.
            MediaTooLargeError: the media are too large, or will be by `body_bytes`.
            PromptTooLongError: the prompt is too long.
        """
        self._fed_bytes += len(piece)
        piece, self._tail = self._tail + piece, b""
        at = 0
        while at < len(piece) and not self._over:
            at = self._outside(piece, at) if self._string_at is None else self._inside(piece, at)
            if len(self._rest) > MOST_REST_BYTES or self._marks > _MOST_MARKS:
                raise TooLargeError(
                    f"without prompt and media a request may have {MOST_REST_BYTES} bytes at most,"
                    f" and {_MOST_MARKS} brackets and commas"
                )
        if self._media_at is not None:
            self._refuse_large_media(max(self._body_bytes, self._fed_bytes) - self._media_at)
        return self.held_bytes

    def finish(self) -> CompletionRequest:
        """Returns the request; called after the last piece. Raises BadRequestError if the body is not a request."""
        request = golang.decode(bytes(self._rest + self._tail), CompletionRequest, self.strangers, self._place)
        if self._media:
            known = {b64decode(self._stand_in_of(number)): data for number, data in enumerate(self._media)}
            media = [
                msgspec.structs.replace(each, data=known[each.data].finish()) if each.data in known else each
                for each in request.media
            ]
            request = msgspec.structs.replace(request, media=media)
        if request.prompt != self._stand_in:
            return request
        text = "".join([part.decode() for part in self._prompt])
        return msgspec.structs.replace(request, prompt=text)

    def _refuse_large_media(self, size: int) -> None:
        if size > MOST_MEDIA_BYTES:
            raise MediaTooLargeError(
                f"the media of the request take {size} bytes{'' if self._body_bytes else ' or more'}, in base64:"
                f" the limit is {MOST_MEDIA_BYTES}"
            )

    def _place(self, at: int) -> int:
        """Returns the position in the body that belongs to the position `at` in the rest."""
        _, missing = self._shifts[bisect_right(self._shifts, at, key=itemgetter(0)) - 1]
        return at + missing

    def _stand_in_of(self, number: int) -> str:
        """Returns the short base64 text that replaces the data of media item `number` in the rest."""
        return f"{self._stand_in}{number:08}"

    def _outside(self, piece: bytes, at: int) -> int:
        """Reads brackets and strings up to a string whose end has not arrived. Returns the new position."""
        depth, after_colon, end = self._depth, self._after_colon, len(piece)
        for found in _TOKENS.finditer(piece, at):
            token = found[0]
            if len(token) > 1:
                if depth == 1 and not after_colon:
                    self._name = token[1:-1]
                elif depth == _MEDIA_DEPTH and not after_colon:
                    self._media_name = token[1:-1]
                after_colon = False
            elif token == b":":
                after_colon = True
            elif token == b'"':
                end = found.end()
                self._string_at = len(self._rest) + found.start() - at
                self._long = False
                break
            else:
                after_colon = False
                self._marks += 1
                if token == b"," and depth < _MEDIA_DEPTH:
                    self._item = self._item + 1 if depth > 1 else 0
                depth += (token in b"[{") - (token in b"]}")
                if depth <= 0:
                    end, self._over = found.end(), True
                    break
        self._depth = depth
        self._after_colon = after_colon
        self._rest += piece[at:end]
        return end

    def _inside(self, piece: bytes, at: int) -> int:
        assert self._string_at is not None
        end = _end_of_string(piece, at)
        closed = piece[end : end + 1] == b'"'
        text, used = utf_8_decode(piece[at:end], "surrogateescape", closed)
        if not closed:
            end = at + used
            self._tail = piece[end:]
        self._end = self._fed_bytes - len(piece) + end
        if len(self._tail) > _ESCAPE_BYTES:
            raise no_json("Invalid \\escape", "", 0, self._end)
        if self._long:
            self._take(text)
        else:
            self._rest += piece[at:end]
            if len(self._rest) - self._string_at > _LONG_BYTES:
                self._begin_long()
        if not closed:
            return len(piece)
        if self._is_key:
            self._name = bytes(self._rest[self._string_at + 1 :])
        elif self._depth == _MEDIA_DEPTH and not self._after_colon and not self._long:
            self._media_name = bytes(self._rest[self._string_at + 1 :])
        if self._long:
            self._shifts.append((len(self._rest), self._end - len(self._rest)))
        self._rest += b'"'
        self._string_at = None
        self._after_colon = False
        return end + 1

    @property
    def _is_key(self) -> bool:
        """True if the current string is the key of a member of the body."""
        return self._depth == 1 and not self._after_colon

    def _begin_long(self) -> None:
        """Begins a long string. In the rest, a token replaces the prompt and data of media; unused values are empty."""
        if self._is_key:
            return
        assert self._string_at is not None
        field = golang.field(CompletionRequest, self._name)
        self._wanted = field is not None and field.type is str and self._depth == 1
        if field is not None and get_origin(field.type) is not list and not self._wanted:
            return
        start = self._string_at + 1
        text = self._rest[start:].decode(errors="surrogateescape")
        del self._rest[start:]
        self._long = True
        self._data = None
        if self._is_data:
            self._rest += self._stand_in_of(len(self._media)).encode()
            self._media.append(data := Base64Text(f"Media[{self._item}].data"))
            if self._media_at is None:
                self._media_at = self._fed_bytes
            self._data = data
        elif self._wanted:
            self._rest += self._stand_in.encode()
            self._prompt = []
            self._prompt_bytes = 0
        self._take(text)

    @property
    def _is_data(self) -> bool:
        """True if the current string is the data of media."""
        of_body = golang.field(CompletionRequest, self._name)
        if self._depth != _MEDIA_DEPTH or not self._after_colon or of_body is None or of_body.name != "media":
            return False
        member = golang.field(Media, self._media_name)
        return member is not None and member.type is bytes

    def _take(self, text: str) -> None:
        """Decodes the escapes in a part of a long string, and adds the part to the prompt or to the data of media."""
        try:
            text, _ = scanstring(f'{text}"', 0)
        except json.JSONDecodeError as error:
            at = self._end - len(text[error.pos :].encode(errors="surrogateescape"))
            raise no_json(error.msg, text, error.pos, at) from None
        if self._data is not None:
            self._media_bytes += self._data.take(text)
        elif self._wanted:
            self._prompt.append(golang.clean(text).encode())
            self._prompt_bytes += len(self._prompt[-1])
            if self._prompt_bytes > self._most_prompt_bytes:
                raise PromptTooLongError(self._prompt_bytes)


def _end_of_string(piece: bytes, at: int) -> int:
    """Returns the position after the string that continues at `at`, or after the part of it that is complete."""
    quote = piece.find(b'"', at)
    end = quote if quote >= 0 else len(piece)
    if piece.find(b"\\", at, end) < 0:
        return end  # most strings have no escape; for them this is much quicker
    found = _TO_THE_END.match(piece, at)
    assert found is not None
    return found.end()
