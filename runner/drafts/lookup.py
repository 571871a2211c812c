"""The drafter of one request: what followed when its text stood like this before."""

from collections.abc import Sequence

from runner.drafts.draft import Draft
from runner.drafts.ring import Earlier, Ring
from runner.drafts.text import MOST_MATCH, Found, Text

_WIDTHS = (2, 8)
_INDEX_TOKENS = 256  # a call of `extend`, beside its own
_KEPT_PROMPT_TOKENS = 2 * MOST_MATCH


class Lookup:
    """Proposes what followed the longest end of the request's text elsewhere: in the text itself, or in the ring.

    Owner: the engine thread.
    """

    def __init__(self, prompt: Sequence[int], ring: Ring | None = None, salt: str = "") -> None:
        """Negative ids of the prompt match nothing. Nothing is indexed yet."""
        self._text = Text(_WIDTHS, list(prompt))
        self._prompt_tokens = len(prompt)
        self._ring = ring
        self._salt = salt
        self._own: Found | None = None
        self._earlier: Earlier | None = None

    def index(self, most: int) -> bool:
        """Indexes up to `most` more tokens of the text; returns True if none are left. About a microsecond a token.

        A prompt can be indexed between the slices of its prefill. What is left then, `extend` does bit by bit.
        """
        return self._text.index(most)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends generated tokens and indexes them, if all before them is indexed; else a part of that."""
        self._text.append(tokens)
        self._text.index(len(tokens) + _INDEX_TOKENS)
        for token in tokens:
            if self._own:
                self._own = self._text.follow(self._own, token)
            if self._earlier:
                text, found = self._earlier
                followed = text.follow(found, token)
                self._earlier = Earlier(text, followed) if followed else None

    def propose(self, most: int) -> Draft | None:
        """Returns up to `most` tokens that may come next, or None. The longest match wins, of equally long ones that
        in the request's own text."""
        if not self._own or (self._ring and not self._earlier):
            ending = self._text.ending()
            self._own = self._own or self._text.find(ending)
            if self._ring and not self._earlier and not (self._own and self._own.match == MOST_MATCH):
                self._earlier = self._ring.find(ending, self._salt)
        own, earlier = self._own, self._earlier
        if own and not (earlier and earlier.found.match > own.match):
            return Draft(self._text.following(own.places, most), "own", own.match)
        if earlier:
            return Draft(earlier.text.following(earlier.found.places, most), "earlier", earlier.found.match)
        return None

    def kept(self) -> list[int]:
        """Returns what the ring should keep of this request: its answer, with the last tokens of its prompt."""
        return self._text.since(self._prompt_tokens - _KEPT_PROMPT_TOKENS)

    @property
    def nbytes(self) -> int:
        """The memory of the text and its index, in bytes."""
        return self._text.nbytes
