"""Drafts of known text: the tokens that followed the end of a request's text before."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from runner.drafts.draft_policy import Draft
from runner.drafts.text import MOST_MATCH, IndexedText, TextMatch

_WIDTHS = (4, 16)  # two tokens of another request mean little; chat templates end with up to ten fixed ones
_END = -1  # after each text
_PARTS = 4  # the ring forgets one part at a time, and searches each by itself
_LEAST_SHARE = 16  # a part takes at least the room of 1 / 16 of a full one
_MOST_WAITING = 64  # texts


class _Part(NamedTuple):
    """Texts of one salt, one after the other."""

    salt: str
    text: IndexedText


class Earlier(NamedTuple):
    """The places in earlier answers after the end of a text."""

    text: IndexedText
    found: TextMatch


class Ring:
    """The answers of ended requests, the oldest forgotten first. Texts of one salt are never searched for another.

    An answer is kept with the last tokens of its prompt, which are enough to find its beginning again. The rest of a
    prompt stands in the next prompt that repeats it, and the prompts of agents, which contain each other, would fill
    the ring with copies. Owner: the engine thread.
    """

    def __init__(self, most_tokens: int = 1 << 20) -> None:
        """Keeps up to `most_tokens` tokens, at 20 bytes each in full parts, and at most 28."""
        self._part_tokens = most_tokens // _PARTS
        self._parts: list[_Part] = []  # the newest one is the last
        self._waiting: deque[tuple[Sequence[int], str]] = deque(maxlen=_MOST_WAITING)
        self._adding: tuple[IndexedText, Sequence[int]] | None = None  # and the rest of its tokens

    def add(self, tokens: Sequence[int], salt: str = "") -> None:
        """Takes the text of an ended request, which `index` adds. Keeps only the end of a text longer than a part."""
        self._waiting.append((tokens[1 - self._part_tokens :], salt))

    def index(self, most: int) -> bool:
        """Adds and indexes the next `most` tokens (about 1 µs each). Returns True if none are left."""
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
        """Makes the newest part of the salt the last of all parts, or a new one if its room is too small; returns
        it."""
        newest = next((part for part in reversed(self._parts) if part.salt == salt), None)
        if newest and len(newest.text) + room <= self._part_tokens:
            self._parts.remove(newest)
        else:
            newest = _Part(salt, IndexedText(_WIDTHS, array("i")))
        free = self._part_tokens * _PARTS - self._share(len(newest.text) + room)
        free -= sum(self._share(len(part.text)) for part in self._parts)
        while free < 0:
            free += self._share(len(self._parts.pop(0).text))
        self._parts.append(newest)
        return newest

    def _share(self, tokens: int) -> int:
        return max(tokens, self._part_tokens // _LEAST_SHARE)

    def find(self, ending: Sequence[int], salt: str = "") -> Earlier | None:
        """Returns the places after the longest end of `ending`, in the newest part that has it."""
        best: Earlier | None = None
        for part in reversed(self._parts):
            found = part.text.find(ending) if part.salt == salt else None
            if found and (not best or found.match > best.found.match):
                best = Earlier(part.text, found)
                if found.match == MOST_MATCH:
                    break
        return best


_OWN_WIDTHS = (2, 8)
_INDEX_TOKENS = 256  # earlier tokens that each call of `extend` indexes
_KEPT_PROMPT_TOKENS = 2 * MOST_MATCH


class Lookup:
    """Proposes the tokens that followed the longest end of a request's text, in the text itself or in the ring. Owner:
    the engine thread."""

    def __init__(self, prompt: Sequence[int], ring: Ring, salt: str = "") -> None:
        """Indexes nothing yet. Negative ids of the prompt match nothing."""
        self._text = IndexedText(_OWN_WIDTHS, list(prompt))
        self._prompt_tokens = len(prompt)
        self._ring = ring
        self._salt = salt
        self._own: TextMatch | None = None
        self._earlier: Earlier | None = None

    def index(self, most: int) -> bool:
        """Indexes the next `most` tokens of the text (about 1 µs each). Returns True if none are left.

        A prompt can be indexed between the slices of its prefill. `extend` indexes the rest bit by bit.
        """
        return self._text.index(most)

    def extend(self, tokens: Sequence[int]) -> bool:
        """Appends generated tokens, and indexes the next tokens of the text. Returns True if the end of the text is
        found elsewhere."""
        self._text.append(tokens)
        self._text.index(len(tokens) + _INDEX_TOKENS)
        for token in tokens:
            if self._own:
                self._own = self._text.follow(self._own, token)
            if self._earlier:
                text, found = self._earlier
                followed = text.follow(found, token)
                self._earlier = Earlier(text, followed) if followed else None
        if not self._own or not self._earlier:
            ending = self._text.ending()
            self._own = self._own or self._text.find(ending)
            if not self._earlier and not (self._own and self._own.match == MOST_MATCH):
                self._earlier = self._ring.find(ending, self._salt)
        return self._own is not None or self._earlier is not None

    def propose(self, most: int) -> Draft | None:
        """Returns up to `most` tokens that may come next, or None. The longest match wins; of equals, the one in the
        request's own text."""
        own, earlier = self._own, self._earlier
        if own and not (earlier and earlier.found.match > own.match):
            return Draft(self._text.following(own.places, most), "own", own.match)
        if earlier:
            return Draft(earlier.text.following(earlier.found.places, most), "earlier", earlier.found.match)
        return None

    def kept(self) -> list[int]:
        """Returns the tokens of this request for the ring: its answer, after the last tokens of its prompt."""
        return self._text.since(self._prompt_tokens - _KEPT_PROMPT_TOKENS)
