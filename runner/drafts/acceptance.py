"""How often drafts like this one were right, token by token."""

from collections.abc import Iterator

_FIRST = (0.3, 0.5, 0.7, 0.8, 0.9)
"""What is expected of the first token at first, for matches of 1-2, 3-4, 5-8, 9-16 and more tokens."""
_FIRST_WEIGHT = 2.0  # of what is expected, in rounds; it fades as they do
_KEPT = 1 - 1 / 24  # of all counts, by each round
_ENOUGH = 8  # rounds, until the counts are trusted beyond the length of the match
_FIRST_PAUSE = 4  # drafts between two probes
LOOKUP_PAUSE, BLOCK_PAUSE, MODEL_PAUSE = 64, 64, 256
"""The most drafts between two probes in vain. One of known text costs a row more, a sixth of a step; a block of drafts
about half a step. A model that drafts token by token reads the end of the text for it, drafts, and nothing is
dispatched ahead: up to two steps."""


def match_class(match: int) -> int:
    """Returns 0 to 4 for matches of 1-2, 3-4, 5-8, 9-16 and more tokens."""
    return min(max(match - 1, 1).bit_length() - 1, len(_FIRST) - 1)


class Acceptance:
    """The counts of drafts from one source, with matches of one class. Owner: the engine thread.

    A position counts only if all before it were right. Counts fade with each round that drafts, so a position that was
    not tried for a while is expected to be like the one before it, and so is tried again. Where nothing is drafted any
    more, or less than could be, a probe goes one token further now and then, ever more rarely while it is in vain.
    """

    def __init__(self, match_class: int, most: int) -> None:
        """`most` is the length of the longest draft."""
        self.most_pause = LOOKUP_PAUSE
        """The most drafts between two probes."""
        self._tried = [_FIRST_WEIGHT] + [0.0] * (most - 1)
        self._right = [_FIRST_WEIGHT * _FIRST[match_class]] + [0.0] * (most - 1)
        self._pause = _FIRST_PAUSE
        self._waited = 0
        self._probe = 0
        self._idle = False  # nothing was drafted the last time

    @property
    def trusted(self) -> bool:
        """True if there are counts enough."""
        return self._tried[0] >= _ENOUGH

    def rates(self) -> Iterator[float]:
        """Iterates over how likely each token is right if those before it are."""
        rate = self._right[0] / self._tried[0]
        yield rate
        for tried, right in zip(self._tried[1:], self._right[1:], strict=True):
            rate = (right + rate * _FIRST_WEIGHT) / (tried + _FIRST_WEIGHT)
            yield rate

    def rests(self) -> bool:
        """Returns True if nothing was drafted the last time, and no probe is due. That counts as another draft that was
        cut to nothing: there is no need to find that out token by token."""
        if not self._idle or self._waited + 1 >= self._pause:
            return False
        self._waited += 1
        return True

    def probes(self, length: int, *, hopeful: bool = True) -> bool:
        """Returns True if a draft that would be cut to `length` tokens should have one more, to see what comes of it.
        If that would not pay even if it were right, it is not `hopeful`: then only what it costs is seen."""
        self._waited += 1
        self._idle = False
        if self._waited < self._pause:
            self._idle = not length
            return False
        self._waited, self._probe = 0, length + 1 if hopeful else 0
        self._pause = min(2 * self._pause, self.most_pause)
        return True

    def learned(self, taken: int, accepted: int) -> None:
        """Learns that of `taken` tokens, at least one, the first `accepted` were right."""
        if accepted >= self._probe > 0:
            self._pause = _FIRST_PAUSE
        self._probe = 0
        for index, tried in enumerate(self._tried):
            seen = index < taken and index <= accepted
            self._tried[index] = tried * _KEPT + seen
            self._right[index] = self._right[index] * _KEPT + (seen and index < accepted)
