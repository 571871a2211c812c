"""The places behind all runs of as many tokens, newest first.

A *place* is a position in a text; the run of a place is the tokens right before it. Places whose runs have the same
hash form a list: a table holds the newest of them, and each place the next older one. So a place takes 4 bytes, and the
table 2 to 8 for each place.
"""

from array import array
from collections.abc import Iterator, Sequence

_FACTOR, _BITS = 0x2545F491, (1 << 30) - 1  # small enough for the fast way of Python's integers
_LEAST_TABLE = 1024
_PLACES_AN_ENTRY = 2  # at most; half of it in a new table
_MOST_STEPS = 32  # from place to place, for one run


class Chain:
    """The places behind the runs of `width` tokens in one text, which only grows. Owner: the engine thread."""

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

        The end of the text is no place: nothing follows it yet. If the text has outgrown the table, a larger one is
        begun, and all places are linked anew.
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
        """Iterates over the places behind this run, newest first; behind others in between."""
        place = self._newest[hash_of(run) & (len(self._newest) - 1)]
        older, width = self._older, self.width
        for _ in range(_MOST_STEPS):
            if not place:
                return
            yield place
            place = older[place - width]

    @property
    def nbytes(self) -> int:
        """The memory of the table and the places, in bytes."""
        return self._newest.__sizeof__() + self._older.__sizeof__()


def hash_of(run: Sequence[int]) -> int:
    """Returns the hash of a run of tokens; its lowest bits are the best ones."""
    value = 0
    for token in run:
        value = (value * _FACTOR + token) & _BITS
    return value
