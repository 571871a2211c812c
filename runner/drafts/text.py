"""A text that grows, and the places in it where its like occurred before."""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from runner.drafts.chain import Chain

MOST_MATCH = 32
"""Matches are not followed any further back than so many tokens."""
_MOST_PLACES = 8
"""Of the places with the same run, so many are compared, the newest ones."""


class Found(NamedTuple):
    """Where the end of a text occurred before."""

    match: int
    """How many tokens are the same, at most `MOST_MATCH`."""
    places: list[int]
    """The positions behind them, newest first; a token follows each."""


class Text:
    """Token ids and their index. Negative ids stand for no token: they match nothing and are never proposed.

    Owner: the engine thread.
    """

    def __init__(self, widths: Iterable[int], ids: "list[int] | array[int]") -> None:
        """`widths` are the lengths of the runs that are indexed, in tokens: no match is shorter than the least. `ids`
        begins the text, and is the text's from now on."""
        self._ids = ids
        self._chains = [Chain(width) for width in sorted(widths)]

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, tokens: Iterable[int]) -> None:
        """Appends tokens, without their index."""
        self._ids.extend(tokens)

    def index(self, most: int) -> bool:
        """Indexes up to `most` more tokens; returns True if none are left. About a microsecond a token."""
        done = [chain.link(self._ids, most) for chain in self._chains]
        return all(done)

    def since(self, position: int) -> list[int]:
        """Returns the tokens from a position on, or all if it is negative."""
        return list(self._ids[max(0, position) :])

    def ending(self) -> list[int]:
        """Returns the last tokens, at most `MOST_MATCH`, without what stands before a negative id."""
        ending = list(self._ids[-MOST_MATCH:])
        if min(ending, default=0) < 0:
            last = max(index for index, token in enumerate(ending) if token < 0)
            return ending[last + 1 :]
        return ending

    def find(self, ending: Sequence[int]) -> Found | None:
        """Returns where the longest end of `ending` occurred before, in what is indexed."""
        best, places = 0, list[int]()
        for chain in self._chains:
            if len(ending) < chain.width:
                break
            compared = 0
            for place in chain.places(ending[-chain.width :]):
                match = self._match(place, ending)
                if match < chain.width:
                    continue
                if match > best:
                    best, places = match, [place]
                elif match == best and place not in places:
                    places.append(place)
                compared += 1
                if compared == _MOST_PLACES:
                    break
            else:
                break  # these were all
        return Found(best, places) if places else None

    def _match(self, place: int, ending: Sequence[int]) -> int:
        """Returns how many tokens before a place are the last ones of `ending`; 0 if no token follows it."""
        ids = self._ids
        if ids[place] < 0:
            return 0
        match, most = 0, min(place, len(ending))
        while match < most and ids[place - match - 1] == ending[-match - 1]:
            match += 1
        return match

    def follow(self, found: Found, token: int) -> Found | None:
        """Returns what `find` would if this token came next, from what it found before; None if nothing is left of it.

        The longest match has one token more, so it was among the longest ones before.
        """
        ids, last = self._ids, len(self._ids) - 1
        places = [place + 1 for place in found.places if ids[place] == token and place < last and ids[place + 1] >= 0]
        return Found(min(found.match + 1, MOST_MATCH), places) if places else None

    def following(self, places: Sequence[int], most: int) -> list[int]:
        """Returns what follows places of this text, up to a negative id: at each token what follows most of them, of
        equally many what follows the newest. A text that ends there goes on as if it repeated itself."""
        ids, end = self._ids, len(self._ids)
        tokens = list[int]()
        for index in range(most):
            if len(places) == 1 and places[0] + most <= end:
                tokens.extend(ids[places[0] + index : places[0] + most])
                break
            nexts = [ids[at] if (at := place + index) < end else tokens[at - end] for place in places]
            token = max(nexts, key=nexts.count)
            if nexts.count(token) < len(nexts):
                places = [place for place, its in zip(places, nexts, strict=True) if its == token]
            tokens.append(token)
        if min(tokens, default=0) < 0:
            return tokens[: next(index for index, token in enumerate(tokens) if token < 0)]
        return tokens

    @property
    def nbytes(self) -> int:
        """The memory of the ids, without that of Python's integers, and of the index, in bytes."""
        return self._ids.__sizeof__() + sum(chain.nbytes for chain in self._chains)
