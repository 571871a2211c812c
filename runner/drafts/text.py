"""A text that grows, and the places in it where a run of tokens occurred before."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_FACTOR, _BITS = 0x2545F491, (1 << 30) - 1  # small enough for Python's fast integers
_LEAST_TABLE = 1024
_PLACES_AN_ENTRY = 2  # the most places for each entry of the table; half of it in a new one
_MOST_STEPS = 32  # the most steps from place to place, for one run


class PlaceChain:
    """The places after the runs of `width` tokens in one text that only grows, newest first.

    A *place* is a position in the text; its run is the tokens right before it. Places whose runs have the same hash
    form a list: a table holds the newest of them, and each place the next older one. So a place takes 4 bytes, and the
    table 2 to 8 bytes for each place. Owner: the engine thread."""

    def __init__(self, width: int) -> None:
        """`width` is at least 1."""
        self.width = width
        self._oldest_factor = pow(_FACTOR, width, _BITS + 1)
        self._begin(_LEAST_TABLE)

    def _begin(self, entries: int) -> None:
        self._newest = array("i", bytes(4 * entries))  # 0 is no place: the first one is at `width`
        self._older = array("i")  # from the place at `width` on
        self._hash = 0  # of the run before the next place

    def link(self, text: Sequence[int], most: int) -> bool:
        """Links up to `most` more places; returns True if none are left.

        The end of the text is no place, since nothing follows it yet. If the text has outgrown the table, begins a
        larger one and links all places anew.
        """
        newest, older, width = self._newest, self._older, self.width
        place, size = len(older) + width, len(text)
        if place >= size:
            return True
        if size > _PLACES_AN_ENTRY * len(newest):
            entries = len(newest)
            while size > entries:
                entries *= 2
            self._begin(entries)
            return self.link(text, most)
        value = self._hash if place > width else hash_of(text[:width])
        last, oldest_factor = len(newest) - 1, self._oldest_factor
        stop = min(place + most, size)
        while place < stop:
            entry = value & last
            older.append(newest[entry])
            newest[entry] = place
            value = (value * _FACTOR + text[place] - text[place - width] * oldest_factor) & _BITS
            place += 1
        self._hash = value
        return stop == size

    def places(self, run: Sequence[int]) -> Iterator[int]:
        """Yields the places after `run` and after other runs of the same hash, newest first."""
        place = self._newest[hash_of(run) & (len(self._newest) - 1)]
        older, width = self._older, self.width
        for _ in range(_MOST_STEPS):
            if not place:
                return
            yield place
            place = older[place - width]


def hash_of(run: Sequence[int]) -> int:
    """Returns the hash of a run of tokens, of which the lowest bits are the best."""
    value = 0
    for token in run:
        value = (value * _FACTOR + token) & _BITS
    return value


MOST_MATCH = 32
"""The most tokens of a match."""
_MOST_PLACES = 8
"""The most places with the same run that are compared, newest first."""


class TextMatch(NamedTuple):
    """The places of a text after tokens that equal the end of a text."""

    match: int
    """The number of equal tokens, at most `MOST_MATCH`."""
    places: list[int]
    """The positions after these tokens, newest first; a token follows each."""


class IndexedText:
    """Token ids and their index. Negative ids stand for no token: they match nothing and are never proposed. Owner: the
    engine thread."""

    def __init__(self, widths: Iterable[int], ids: "list[int] | array[int]") -> None:
        """`widths` are the lengths of the indexed runs, in tokens: no match is shorter than the least. `ids` begins the
        text, which owns it from now on."""
        self._ids = ids
        self._chains = [PlaceChain(width) for width in sorted(widths)]

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, tokens: Iterable[int]) -> None:
        """Appends tokens, without their index."""
        self._ids.extend(tokens)

    def index(self, most: int) -> bool:
        """Indexes the next `most` tokens (about 1 µs each). Returns True if none are left."""
        done = [chain.link(self._ids, most) for chain in self._chains]
        return all(done)

    def since(self, position: int) -> list[int]:
        """Returns the tokens from a position on, or all for a negative one."""
        return list(self._ids[max(0, position) :])

    def ending(self) -> list[int]:
        """Returns the tokens after the last negative id, at most the last `MOST_MATCH`."""
        ending = list(self._ids[-MOST_MATCH:])
        if min(ending, default=0) < 0:
            last = max(index for index, token in enumerate(ending) if token < 0)
            return ending[last + 1 :]
        return ending

    def find(self, ending: Sequence[int]) -> TextMatch | None:
        """Returns the indexed places after the longest end of `ending`."""
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
        return TextMatch(best, places) if places else None

    def _match(self, place: int, ending: Sequence[int]) -> int:
        """Returns the number of tokens before a place that are the last ones of `ending`; 0 if no token follows."""
        ids = self._ids
        if ids[place] < 0:
            return 0
        match, most = 0, min(place, len(ending))
        while match < most and ids[place - match - 1] == ending[-match - 1]:
            match += 1
        return match

    def follow(self, found: TextMatch, token: int) -> TextMatch | None:
        """Returns the result of `find` after one more token, given the result before it; None if no place is left.

        The longest match has one token more, so it was among the longest ones before.
        """
        ids, last = self._ids, len(self._ids) - 1
        places = [place + 1 for place in found.places if ids[place] == token and place < last and ids[place + 1] >= 0]
        return TextMatch(min(found.match + 1, MOST_MATCH), places) if places else None

    def following(self, places: Sequence[int], most: int) -> list[int]:
        """Returns the tokens after these places of the text, up to a negative id. Each token is the one after most of
        the places or, of equally many, after the newest. At its end the text continues as if it repeated itself."""
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
