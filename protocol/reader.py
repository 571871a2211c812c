"""The body of a completion, read in pieces as they arrive: nobody holds or looks at the whole of a large one at once.

Only strings are looked for. A long one is checked as it comes; the prompt's is kept aside, what nobody reads (data of
media, keys that mean nothing here) is not kept at all. All the rest is small, and is decoded at the end.
"""

import re
import secrets
from codecs import utf_8_decode
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
from typing import get_origin

import msgspec

from protocol import golang
from protocol.golang import BadRequestError
from protocol.request import CompletionRequest

MOST_REST_BYTES = 2 << 20
"""Beside long strings: a schema may have a megabyte of it."""
_MOST_MARKS = 1 << 18
"""Brackets and commas in it: each may stand for a value, of a hundred bytes of memory."""
_LONG_BYTES = 1 << 12  # many small pictures are not kept either
_ESCAPE_BYTES = 12  # a character beyond U+FFFF, as two escapes
_TO_THE_END = re.compile(
    rb'[^"\\]*+(?:\\(?:[^u]|u(?![dD][89abAB]..(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z)[0-9a-fA-F]{4})[^"\\]*+)*+', re.DOTALL
)
"""To the end of a string, or of what has arrived of it, but neither into an escape nor between two that are a pair."""
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[][{},:"]', re.DOTALL)
"""Strings and what stands between them; a quote alone begins a string that goes on."""


class TooLargeError(Exception):
    """Larger than any request is; the text says in what."""


class PromptTooLongError(Exception):
    """More bytes than the model could ever take; `size` says how many had come by then, as UTF-8."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class CompletionReader:
    """One body. Owner: who reads it from the connection; each piece costs time in proportion to its length."""

    def __init__(self, most_prompt_bytes: int) -> None:
        """`most_prompt_bytes` is that of the prompt in UTF-8, which a long one is refused beyond."""
        self._most_prompt_bytes = most_prompt_bytes
        self._rest = bytearray()
        self._tail = b""  # has arrived, but cannot be understood yet
        self._depth = self._marks = 0
        self._behind_colon = False
        self._name = b""  # of the member that we are in
        self._string_at: int | None = None  # where it begins in the rest, if we are in one
        self._over = False
        self._long = self._wanted = False  # whether this string is not for the rest, and whether it is for the prompt
        self._prompt: list[bytes] = []
        self._prompt_bytes = 0
        self._stand_in = secrets.token_hex(16)

    @property
    def held_bytes(self) -> int:
        """What it keeps in memory."""
        return len(self._rest) + self._prompt_bytes

    def feed(self, piece: bytes) -> int:
        """Take the next piece, of some ten kilobytes; returns `held_bytes`.

        Raises:
            BadRequestError: it can become no request any more.
            TooLargeError: there is too much beside its long strings.
            PromptTooLongError: the prompt is longer than it may be.
        """
        piece, self._tail = self._tail + piece, b""
        at = 0
        while at < len(piece) and not self._over:
            at = self._outside(piece, at) if self._string_at is None else self._inside(piece, at)
            if len(self._rest) > MOST_REST_BYTES or self._marks > _MOST_MARKS:
                raise TooLargeError(
                    f"beside prompt and media a request has at most {MOST_REST_BYTES} bytes,"
                    f" and {_MOST_MARKS} brackets and commas"
                )
        return self.held_bytes

    def finish(self) -> CompletionRequest:
        """The request, once all has been fed. BadRequestError if it is none."""
        request = golang.decode(bytes(self._rest + self._tail), CompletionRequest)
        if request.prompt != self._stand_in:
            return request
        text = "".join([part.decode() for part in self._prompt])
        return msgspec.structs.replace(request, prompt=text)

    def _outside(self, piece: bytes, at: int) -> int:
        """Follow brackets and short strings, up to one whose end has not come; returns where that goes on."""
        depth, behind_colon, end = self._depth, self._behind_colon, len(piece)
        for found in _TOKENS.finditer(piece, at):
            token = found[0]
            if len(token) > 1:
                if depth == 1 and not behind_colon:
                    self._name = token[1:-1]
                behind_colon = False
            elif token == b":":
                behind_colon = True
            elif token == b'"':
                end = found.end()
                self._string_at, self._long = len(self._rest) + found.start() - at, False
                break
            else:
                behind_colon = False
                self._marks += 1
                depth += (token in b"[{") - (token in b"]}")
                if depth <= 0:
                    end, self._over = found.end(), True
                    break
        self._depth, self._behind_colon = depth, behind_colon
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
            if len(self._tail) > _ESCAPE_BYTES:
                raise BadRequestError("an escape that is none")
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
        self._rest += b'"'
        self._string_at, self._behind_colon = None, False
        return end + 1

    @property
    def _is_key(self) -> bool:
        """Whether this string names a member of the body."""
        return self._depth == 1 and not self._behind_colon

    def _begin_long(self) -> None:
        """This string is long: if it is not to be decoded with the rest, something short stands there in its place."""
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
        if self._wanted:
            self._rest += self._stand_in.encode()
            self._prompt, self._prompt_bytes = [], 0
        self._take(text)

    def _take(self, text: str) -> None:
        """A part of a long string, as it is written."""
        try:
            text, _ = scanstring(f'{text}"', 0)
        except ValueError as error:
            raise BadRequestError(str(error)) from None
        if self._wanted:
            self._prompt.append(golang.clean(text).encode())
            self._prompt_bytes += len(self._prompt[-1])
            if self._prompt_bytes > self._most_prompt_bytes:
                raise PromptTooLongError(self._prompt_bytes)


def _end_of_string(piece: bytes, at: int) -> int:
    """Where the string ends that goes on at `at`, or what can be understood of it so far."""
    quote = piece.find(b'"', at)
    end = quote if quote >= 0 else len(piece)
    if piece.find(b"\\", at, end) < 0:
        return end  # which is most of them, and much quicker
    found = _TO_THE_END.match(piece, at)
    assert found is not None
    return found.end()
