"""Turns the tokens of a generation into the text to deliver: whole characters, and no part of a stop string.

Invariants:

1. The delivered text is the decoded text up to the beginning of the first stop string in it.
2. The detokenizer holds only an incomplete character and the longest end of the text that is the beginning of a stop
   string: at most three bytes and `max(len(stop)) - 1` characters.
3. The entry of a token is delivered once, with the last character that the token completed. Entries of tokens that
   complete no character wait for the next character or the end. Tokens after a stop string have no entry.
"""

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Final, Generic, NamedTuple, TypeVar

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


class StopStrings:
    """The stop strings as one automaton (Aho and Corasick): one step per character, for any number of strings.

    A state stands for the longest end of the text so far that is the beginning of a stop string. Empty stop strings
    match nothing. The construction takes time and space in proportion to the characters in all stop strings. Immutable.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.texts = tuple(stops)
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        """By state: the length of the end of the text that may still become a stop string."""
        self.matched = [0]
        """By state: the length of the longest stop string that ends there, or 0."""
        self._fallback = [0]
        for stop in self.texts:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.matched.append(0)
                self._fallback.append(0)
            state = following
        self.matched[state] = self.depth[state]

    def _link(self) -> None:
        """Links each state to the state of its longest shorter end, from short to long."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                self._fallback[following] = self.step(self._fallback[state], character)
                self.matched[following] = self.matched[following] or self.matched[self._fallback[following]]
                queue.append(following)

    def step(self, state: int, character: str) -> int:
        """Returns the state after one more character of text."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)


Entry = TypeVar("Entry")


class TextPiece(NamedTuple, Generic[Entry]):
    """A text to deliver now, and the entries of its tokens. The text is empty if only entries are left."""

    text: str
    entries: list[Entry]


def join_pieces(pieces: "Sequence[TextPiece[Entry]]") -> "TextPiece[Entry]":
    """Returns one piece for all `pieces`. There must be at least one."""
    if len(pieces) == 1:
        return pieces[0]
    return TextPiece("".join(piece.text for piece in pieces), [entry for piece in pieces for entry in piece.entries])


class _Settled(NamedTuple, Generic[Entry]):
    """The entry of a token whose characters are known, and their positions in the decoded text."""

    start: int
    stop: int
    entry: Entry


class Detokenizer(Generic[Entry]):
    """Turns the tokens of one generation into text. Owner: the thread that calls `push`.

    If several stop strings match, the answer ends where the first of them begins, even if another is complete before.
    While an earlier stop string may still match, the detokenizer waits for more text. So the answer does not depend on
    the division of the text into tokens.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stops: StopStrings | None = None) -> None:
        """`token_bytes` maps a token to the bytes that it adds to the output, perhaps none."""
        self._token_bytes = token_bytes
        self._stops = stops
        self._state = 0
        self._match: int | None = None
        self._utf8 = Utf8Stream()
        self._held = ""
        self._delivered = 0
        self._decoded = 0
        self._settled: deque[_Settled[Entry]] = deque()
        self._unsettled: list[Entry] = []
        self.stopped = False
        """True once a stop string has matched: no more text is delivered."""

    def push(self, token_id: int, entry: Entry | None = None) -> TextPiece[Entry] | None:
        """Adds a token, which must not be EOS. Returns the text that can be delivered now, or None. If a token
        completes no character, its entry is delivered with a later character."""
        if self.stopped:
            return None
        if entry is not None:
            self._unsettled.append(entry)
        text = self._utf8.feed(self._token_bytes(token_id))
        return self._deliver(self._append(text)) if text else None

    def completes_stop(self, token: int) -> bool:
        """Returns True if `push(token)` would complete a stop string. Changes nothing."""
        if self._stops is None:
            return False
        ahead = copy(self)
        ahead._utf8, ahead._settled, ahead._unsettled = copy(self._utf8), deque(), []
        ahead.push(token)
        return ahead.stopped

    def finish(self) -> TextPiece[Entry] | None:
        """Ends the text at EOS or at a limit. Returns the held text, which did not become a stop string.

        `Utf8Stream.finish` decides on an incomplete character. If the character is dropped, the entries of its tokens
        are still delivered, perhaps without text: these tokens were drawn. A stop string that has matched but had to
        wait for an earlier one counts now: `stopped` becomes True then.
        """
        if self.stopped:
            return None
        if tail := self._utf8.finish():
            self._append(tail)
        if self._match is not None:
            self.stopped = True
            return self._deliver(self._match)
        self._settle(self._decoded)
        return self._deliver(self._decoded)

    def _append(self, text: str) -> int:
        """Adds decoded text. Returns the position up to which text can be delivered."""
        start = self._decoded
        self._decoded += len(text)
        self._held += text
        if self._unsettled:
            self._settle(start)
        return self._decoded if self._stops is None else self._search(self._stops, start, text)

    def _settle(self, start: int) -> None:
        for entry in self._unsettled:
            self._settled.append(_Settled(start, self._decoded, entry))
        self._unsettled.clear()

    def _search(self, stops: StopStrings, start: int, text: str) -> int:
        state = self._state
        for position, character in enumerate(text, start + 1):
            state = stops.step(state, character)
            if stops.matched[state]:
                found = position - stops.matched[state]
                self._match = found if self._match is None else min(self._match, found)
            if self._match is not None and self._match <= position - stops.depth[state]:
                self.stopped = True
                return self._match
        self._state = state
        return self._decoded - stops.depth[state]

    def _deliver(self, limit: int) -> TextPiece[Entry] | None:
        length = limit - self._delivered
        text, self._held = self._held[:length], self._held[length:]
        self._delivered = limit
        entries: list[Entry] = []
        while self._settled and self._settled[0].stop <= limit:
            entries.append(self._settled.popleft().entry)
        if self.stopped:
            entries.extend(token.entry for token in self._settled if token.start < limit)
        return TextPiece(text, entries) if text or entries else None
