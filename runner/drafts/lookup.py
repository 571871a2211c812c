"""Drafts of known text: finds the end of a request's text at earlier places, and drafts the tokens after it there."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from runner.drafts.draft_policy import Draft
from runner.drafts.text import MOST_MATCH, IndexedText, TextMatch

_WIDTHS = (4, 16)  # lengths of indexed runs: shorter runs mean little; chat templates end with up to 10 fixed tokens
_END = -1  # stands after each text of a part
_PARTS = 4  # the number of full parts in a ring, which forgets one whole part at a time
_LEAST_SHARE = 16  # even a small part counts as 1 / 16 of a full one
_MOST_WAITING = 64  # the most texts that wait to be indexed


class _Part(NamedTuple):
    """Some texts of one salt, one after the other, with an index of their own."""

    salt: str
    text: IndexedText


class Earlier(NamedTuple):
    """The places in one part of the ring at which the end of another text was found."""

    text: IndexedText
    found: TextMatch


class Ring:
    """The answers of ended requests; the oldest are forgotten first. A request finds only texts of its own salt.

    An answer is kept with the last tokens of its prompt, which are enough to find the beginning of the answer again.
    The rest of a prompt is not kept: a later prompt that repeats it contains it anyway, and the prompts of agents
    contain each other and would fill the ring with copies. Owner: the engine thread."""

    def __init__(self, most_tokens: int = 1 << 20) -> None:
        """Keeps up to `most_tokens` tokens, with 20 bytes for each token in a full part, and at most 28 elsewhere."""
        self._part_tokens = most_tokens // _PARTS
        self._parts: list[_Part] = []  # the part that was added to last is at the end
        self._waiting: deque[tuple[Sequence[int], str]] = deque(maxlen=_MOST_WAITING)
        self._adding: tuple[IndexedText, Sequence[int]] | None = None  # a part's text, and the tokens left to add to it

    def add(self, tokens: Sequence[int], salt: str = "") -> None:
        """Lets the text of an ended request wait for `index`. Keeps only the end of a text longer than a part."""
        self._waiting.append((tokens[1 - self._part_tokens :], salt))

    def index(self, most: int) -> bool:
        """Adds and indexes the next `most` tokens that wait, in about 1 µs a token. Returns True if none is left."""
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
        """Returns a part of this salt with room for `room` tokens: the newest one if it has the room, else a new part.
        Moves it to the end of all parts, and forgets the oldest parts if the ring is full."""
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
        """Finds the longest end of `ending` that stands in a part of this salt, and returns the places after it, in the
        newest part that has it; None if no end is found."""
        best: Earlier | None = None
        for part in reversed(self._parts):
            found = part.text.find(ending) if part.salt == salt else None
            if found and (not best or found.match > best.found.match):
                best = Earlier(part.text, found)
                if found.match == MOST_MATCH:
                    break
        return best


_OWN_WIDTHS = (2, 8)
_INDEX_TOKENS = 256  # the tokens that each call of `extend` indexes beside its new ones
_KEPT_PROMPT_TOKENS = 2 * MOST_MATCH


class Lookup:
    """Finds the longest end of a request's text at an earlier place, in the text itself or in the ring, and proposes
    the tokens after it there. Owner: the engine thread."""

    def __init__(self, prompt: Sequence[int], ring: Ring, salt: str = "") -> None:
        """Indexes nothing yet. Negative ids in `prompt` stand for soft tokens, and match nothing."""
        self._text = IndexedText(_OWN_WIDTHS, list(prompt))
        self._prompt_tokens = len(prompt)
        self._ring = ring
        self._salt = salt
        self._own: TextMatch | None = None
        self._earlier: Earlier | None = None

    def index(self, most: int) -> bool:
        """Indexes the next `most` tokens of the text, in about 1 µs a token. Returns True if no token is left. Call it
        between the slices of prefill; `extend` indexes the rest of a prompt in small parts."""
        return self._text.index(most)

    def extend(self, tokens: Sequence[int]) -> bool:
        """Appends generated tokens, and indexes the next tokens of the text. Returns True if the end of the text also
        stands at an earlier place."""
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
        """Returns a draft of up to `most` tokens; None if `extend` has found nothing. The longer match wins; of equal
        matches, the one in the request's own text."""
        own, earlier = self._own, self._earlier
        if own and not (earlier and earlier.found.match > own.match):
            return Draft(self._text.following(own.places, most), "own", own.match)
        if earlier:
            return Draft(earlier.text.following(earlier.found.places, most), "earlier", earlier.found.match)
        return None

    def kept(self) -> list[int]:
        """Returns the tokens of this request that the ring should keep: the end of the prompt, and the answer."""
        return self._text.since(self._prompt_tokens - _KEPT_PROMPT_TOKENS)
