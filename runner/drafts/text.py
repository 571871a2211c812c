"""A text that grows, with an index of its runs: it finds the places of earlier tokens that equal the latest ones."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_FACTOR, _BITS = 0x2545F491, (1 << 30) - 1  # small enough for Python's fast integers
_LEAST_TABLE = 1024
_PLACES_AN_ENTRY = 2  # the most places for each entry of a table; a new table has an entry for each place
_MOST_STEPS = 32  # the most places of one run that are followed


class PlaceChain:
    """An index of one text, which only grows: finds the places after a run of `width` tokens, newest first.

    A *place* is a position in the text; the run of a place is the tokens right before it. Places whose runs have the
    same hash are linked: a table holds the newest of these places, and each place leads to the next older one. A place
    needs 4 bytes, and the table of a long text 2 to 8 bytes for each place. Owner: the engine thread."""

    def __init__(self, width: int) -> None:
        """`width` is the number of tokens of a run, at least 1."""
        self.width = width
        self._oldest_factor = pow(_FACTOR, width, _BITS + 1)
        self._begin(_LEAST_TABLE)

    def _begin(self, entries: int) -> None:
        self._newest = array("i", bytes(4 * entries))  # by hash; 0 means no place, since the first place is `width`
        self._older = array("i")  # for each place from `width` on, the next older place
        self._hash = 0  # the hash of the run before the next place to link

    def link(self, text: Sequence[int], most: int) -> bool:
        """Links up to `most` more places. Returns True if no place is left.

        The end of the text is no place yet, since no token follows it. If the text has outgrown the table, begins a
        larger table, and links the places anew, from the first one."""
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
        """Yields the places after `run`, newest first, and also places after other runs of the same hash."""
        place = self._newest[hash_of(run) & (len(self._newest) - 1)]
        older, width = self._older, self.width
        for _ in range(_MOST_STEPS):
            if not place:
                return
            yield place
            place = older[place - width]


def hash_of(run: Sequence[int]) -> int:
    """Returns the hash of a run of tokens. The lowest bits of the hash are spread best."""
    value = 0
    for token in run:
        value = (value * _FACTOR + token) & _BITS
    return value


MOST_MATCH = 32
"""The most tokens that are compared for a match."""
_MOST_PLACES = 8
"""The most places after one run whose matches are compared, newest first."""


class TextMatch(NamedTuple):
    """The places in a text at which the end of the same text, or of another one, was found."""

    match: int
    """The number of tokens before each place that equal those at the end, at most `MOST_MATCH`."""
    places: list[int]
    """The positions after the equal tokens, newest first. At least one more token follows at each of them."""


class IndexedText:
    """The token ids of a text, and an index of its runs. Negative ids stand for no token: they match nothing, and are
    never proposed. Owner: the engine thread."""

    def __init__(self, widths: Iterable[int], ids: "list[int] | array[int]") -> None:
        """`widths` are the lengths of the indexed runs, in tokens: no match is shorter than the least width. `ids` has
        the first ids of the text; the text appends to this object."""
        self._ids = ids
        self._chains = [PlaceChain(width) for width in sorted(widths)]

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, tokens: Iterable[int]) -> None:
        """Appends tokens. `index` has to index them later."""
        self._ids.extend(tokens)

    def index(self, most: int) -> bool:
        """Indexes the next `most` tokens, in about 1 µs a token. Returns True if no token is left."""
        done = [chain.link(self._ids, most) for chain in self._chains]
        return all(done)

    def since(self, position: int) -> list[int]:
        """Returns the tokens from a position on, or all tokens if the position is negative."""
        return list(self._ids[max(0, position) :])

    def ending(self) -> list[int]:
        """Returns the last tokens of the text, at most `MOST_MATCH`, and only those after the last negative id."""
        ending = list(self._ids[-MOST_MATCH:])
        if min(ending, default=0) < 0:
            last = max(index for index, token in enumerate(ending) if token < 0)
            return ending[last + 1 :]
        return ending

    def find(self, ending: Sequence[int]) -> TextMatch | None:
        """Finds the longest end of `ending` that stands in the indexed text. Returns the places after it, or None."""
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
                break  # longer runs would lead to no other places
        return TextMatch(best, places) if places else None

    def _match(self, place: int, ending: Sequence[int]) -> int:
        """Returns the number of tokens before a place that equal the last tokens of `ending`; 0 if a negative id stands
        at the place."""
        ids = self._ids
        if ids[place] < 0:
            return 0
        match, most = 0, min(place, len(ending))
        while match < most and ids[place - match - 1] == ending[-match - 1]:
            match += 1
        return match

    def follow(self, found: TextMatch, token: int) -> TextMatch | None:
        """Returns the places of `found` at which `token` stands, moved by one, with a match that is one longer; None if
        no place is left. This is the result of `find` for an ending with `token` appended, but faster."""
        ids, last = self._ids, len(self._ids) - 1
        places = [place + 1 for place in found.places if ids[place] == token and place < last and ids[place + 1] >= 0]
        return TextMatch(min(found.match + 1, MOST_MATCH), places) if places else None

    def following(self, places: Sequence[int], most: int) -> list[int]:
        """Returns up to `most` tokens that follow at these places, up to a negative id. Each token is the one that
        follows at most places; of equals, at the newest place. After the text's last token it goes on with the result
        itself, as if the text repeated."""
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
