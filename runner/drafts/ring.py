"""The answers of earlier requests, the oldest forgotten first.

An answer is kept with the last tokens of its prompt, which are enough to find its beginning again. The rest of a prompt
stands in the prompt of whoever repeats it; and agents, whose prompts contain each other, would fill the ring with
copies.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from runner.drafts.text import MOST_MATCH, Found, Text

_WIDTHS = (4, 16)  # two tokens that someone else said say little; chat templates end with up to ten fixed ones
_END = -1  # behind each text
_PARTS = 4  # the ring forgets a part at a time, and each is searched by itself
_LEAST_SHARE = 16  # a part takes the room of 1 / 16 of a full one even if its salt has little text
_MOST_WAITING = 64  # texts


class _Part(NamedTuple):
    """Texts of one salt, one behind the other."""

    salt: str
    text: Text


class Earlier(NamedTuple):
    """Where the end of a text occurred in earlier answers."""

    text: Text
    found: Found


class Ring:
    """Texts of ended requests. What stands under one salt is neither found nor looked at under another.

    Owner: the engine thread.
    """

    def __init__(self, most_tokens: int = 1 << 20) -> None:
        """Keeps up to `most_tokens` tokens, at 20 bytes each in full parts, and at most 28."""
        self._part_tokens = most_tokens // _PARTS
        self._parts: list[_Part] = []  # the one that was begun or filled last at the end
        self._waiting: deque[tuple[Sequence[int], str]] = deque(maxlen=_MOST_WAITING)
        self._adding: tuple[Text, Sequence[int]] | None = None  # and what is left of it

    def add(self, tokens: Sequence[int], salt: str = "") -> None:
        """Takes the text of a request that has ended; `index` adds it. Of a text as long as a part the end is kept."""
        self._waiting.append((tokens[1 - self._part_tokens :], salt))

    def index(self, most: int) -> bool:
        """Adds up to `most` more tokens, so that they are found; returns True if none are left. About a microsecond a
        token."""
        if not self._adding:
            if not self._waiting:
                return True
            tokens, salt = self._waiting.popleft()
            self._adding = self._part(salt, len(tokens) + 1).text, (*tokens, _END)
        text, left = self._adding
        text.append(left[:most])
        self._adding = text, left[most:]
        if text.index(most) and len(left) <= most:
            self._adding = None
        return not self._adding and not self._waiting

    def _part(self, salt: str, room: int) -> _Part:
        """Returns the newest part of the salt, or a new one if that has not so much room, as the last of all parts."""
        newest = next((part for part in reversed(self._parts) if part.salt == salt), None)
        if newest and len(newest.text) + room <= self._part_tokens:
            self._parts.remove(newest)
        else:
            newest = _Part(salt, Text(_WIDTHS, array("i")))
        free = self._part_tokens * _PARTS - self._share(len(newest.text) + room)
        free -= sum(self._share(len(part.text)) for part in self._parts)
        while free < 0:
            free += self._share(len(self._parts.pop(0).text))
        self._parts.append(newest)
        return newest

    def _share(self, tokens: int) -> int:
        return max(tokens, self._part_tokens // _LEAST_SHARE)

    def find(self, ending: Sequence[int], salt: str = "") -> Earlier | None:
        """Returns where the longest end of `ending` occurred, in the newest of several parts."""
        best: Earlier | None = None
        for part in reversed(self._parts):
            found = part.text.find(ending) if part.salt == salt else None
            if found and (not best or found.match > best.found.match):
                best = Earlier(part.text, found)
                if found.match == MOST_MATCH:
                    break
        return best

    @property
    def nbytes(self) -> int:
        """The memory of all texts and their index, in bytes."""
        return sum(part.text.nbytes for part in self._parts)
