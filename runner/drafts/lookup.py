"""The drafter of one request: what followed when its text stood like this before."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from runner.drafts.draft_policy import Draft
from runner.drafts.text import MOST_MATCH, IndexedText, TextMatch

# --- The answers of earlier requests, the oldest forgotten first. An answer is kept with the last tokens of its
# prompt, which are enough to find its beginning again. The rest of a prompt stands in the next prompt that repeats it;
# and agents, whose prompts contain each other, would fill the ring with copies.

_WIDTHS = (4, 16)  # two tokens that someone else said say little; chat templates end with up to ten fixed ones
_END = -1  # after each text
_PARTS = 4  # the ring forgets a part at a time, and each is searched by itself
_LEAST_SHARE = 16  # a part takes the room of 1 / 16 of a full one even if its salt has little text
_MOST_WAITING = 64  # texts


class _Part(NamedTuple):
    """Texts of one salt, one after the other."""

    salt: str
    text: IndexedText


class Earlier(NamedTuple):
    """Where the end of a text occurred in earlier answers."""

    text: IndexedText
    found: TextMatch


class Ring:
    """Texts of ended requests. What stands under one salt is neither found nor looked at under another.

    Owner: the engine thread.
    """

    def __init__(self, most_tokens: int = 1 << 20) -> None:
        """Keeps up to `most_tokens` tokens, at 20 bytes each in full parts, and at most 28."""
        self._part_tokens = most_tokens // _PARTS
        self._parts: list[_Part] = []  # the one that was begun or filled last at the end
        self._waiting: deque[tuple[Sequence[int], str]] = deque(maxlen=_MOST_WAITING)
        self._adding: tuple[IndexedText, Sequence[int]] | None = None  # and what is left of it

    def add(self, tokens: Sequence[int], salt: str = "") -> None:
        """Takes the text of a request that has ended; `index` adds it. Of a text as long as a part the end is kept."""
        self._waiting.append((tokens[1 - self._part_tokens :], salt))

    def index(self, most: int) -> bool:
        """Adds the next `most` tokens, so that they are found (about 1 µs each). Returns True if none are left."""
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
        """Returns the newest part of the salt, or a new one if that has too little room, as the last of all parts."""
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


_OWN_WIDTHS = (2, 8)
_INDEX_TOKENS = 256  # a call of `extend`, beside its own
_KEPT_PROMPT_TOKENS = 2 * MOST_MATCH


class Lookup:
    """Proposes what followed the longest end of the request's text elsewhere: in the text itself, or in the ring.

    Owner: the engine thread.
    """

    def __init__(self, prompt: Sequence[int], ring: Ring | None = None, salt: str = "") -> None:
        """Negative ids of the prompt match nothing. Nothing is indexed yet."""
        self._text = IndexedText(_OWN_WIDTHS, list(prompt))
        self._prompt_tokens = len(prompt)
        self._ring = ring
        self._salt = salt
        self._own: TextMatch | None = None
        self._earlier: Earlier | None = None

    def index(self, most: int) -> bool:
        """Indexes the next `most` tokens of the text (about 1 µs each). Returns True if none are left.

        A prompt can be indexed between the slices of its prefill. What is left then, `extend` does bit by bit.
        """
        return self._text.index(most)

    def extend(self, tokens: Sequence[int]) -> bool:
        """Appends generated tokens and indexes them, if all before them is indexed; else a part of that. Returns True
        if the end of the text stands elsewhere."""
        self._text.append(tokens)
        self._text.index(len(tokens) + _INDEX_TOKENS)
        for token in tokens:
            if self._own:
                self._own = self._text.follow(self._own, token)
            if self._earlier:
                text, found = self._earlier
                followed = text.follow(found, token)
                self._earlier = Earlier(text, followed) if followed else None
        if not self._own or (self._ring and not self._earlier):
            ending = self._text.ending()
            self._own = self._own or self._text.find(ending)
            if self._ring and not self._earlier and not (self._own and self._own.match == MOST_MATCH):
                self._earlier = self._ring.find(ending, self._salt)
        return self._own is not None or self._earlier is not None

    def propose(self, most: int) -> Draft | None:
        """Returns up to `most` tokens that may come next, or None. The longest match wins; of equally long ones the one
        in the request's own text."""
        own, earlier = self._own, self._earlier
        if own and not (earlier and earlier.found.match > own.match):
            return Draft(self._text.following(own.places, most), "own", own.match)
        if earlier:
            return Draft(earlier.text.following(earlier.found.places, most), "earlier", earlier.found.match)
        return None

    def kept(self) -> list[int]:
        """Returns what the ring should keep of this request: its answer, with the last tokens of its prompt."""
        return self._text.since(self._prompt_tokens - _KEPT_PROMPT_TOKENS)
