"""Turns the tokens of a generation into the text to deliver: whole characters, and no part of a stop string.

Invariants:

1. The delivered text is the decoded text up to the beginning of the first stop string in it.
2. The detokenizer holds only an incomplete character and the longest end of the text that is the beginning of a stop
   string: at most three bytes and `max(len(stop)) - 1` characters.
3. The entry of a token is delivered once, with the last character that the token completed. Entries of tokens that
   complete no character wait for the next character or the end. Tokens after a stop string have no entry.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Generic, NamedTuple, TypeVar

from runner.tokenizer.utf8 import Utf8Stream


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
