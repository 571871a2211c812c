"""The share of earlier drafts that were right, token by token. Pure."""

from collections.abc import Iterator

_FIRST = (0.3, 0.5, 0.7, 0.8, 0.9)
"""The expected rate of first tokens before any round, for matches of 1-2, 3-4, 5-8, 9-16 and more tokens."""
_FIRST_WEIGHT = 2.0  # the rounds that this expectation counts as; it fades as they do
_KEPT = 1 - 1 / 24  # the share of all counts that each round keeps
_ENOUGH = 8  # the rounds after which the counts are trusted beyond the length of the match
_FIRST_PAUSE = 4  # the drafts between the first two probes
LOOKUP_PAUSE, BLOCK_PAUSE, MODEL_PAUSE = 64, 64, 256
"""The most drafts between two probes in vain. A probe of known text costs one row more, a sixth of a step; a block of
drafts, about half a step. For a model that drafts token by token a probe costs up to two steps: it reads the end of the
text, drafts, and nothing is dispatched ahead."""


def match_class(match: int) -> int:
    """Returns 0 to 4 for matches of 1-2, 3-4, 5-8, 9-16 and more tokens."""
    return min(max(match - 1, 1).bit_length() - 1, len(_FIRST) - 1)


class Acceptance:
    """The counts of drafts from one source, with matches of one class. Owner: the engine thread.

    A position counts only if all before it were right. Counts fade with each round that drafts, so a position without
    recent rounds is expected to be like the one before it, and is tried again. If drafts are cut, now and then a probe
    goes one token further, ever more rarely while it is in vain.
    """

    def __init__(self, match_class: int, most: int, most_pause: int = LOOKUP_PAUSE) -> None:
        """`most` is the length of the longest draft, `most_pause` the most drafts between two probes."""
        self._most_pause = most_pause
        self._tried = [_FIRST_WEIGHT] + [0.0] * (most - 1)
        self._right = [_FIRST_WEIGHT * _FIRST[match_class]] + [0.0] * (most - 1)
        self._pause = _FIRST_PAUSE
        self._waited = 0
        self._probe = 0
        self._idle = False  # the last draft was cut to nothing

    @property
    def trusted(self) -> bool:
        """True after enough rounds."""
        return self._tried[0] >= _ENOUGH

    def rates(self) -> Iterator[float]:
        """Yields the probability that each token is right if all before it are."""
        rate = self._right[0] / self._tried[0]
        yield rate
        for tried, right in zip(self._tried[1:], self._right[1:], strict=True):
            rate = (right + rate * _FIRST_WEIGHT) / (tried + _FIRST_WEIGHT)
            yield rate

    def rests(self) -> bool:
        """Returns True if the last draft was cut to nothing and no probe is due. Counts that as another such draft,
        which need not be weighed token by token."""
        if not self._idle or self._waited + 1 >= self._pause:
            return False
        self._waited += 1
        return True

    def probes(self, length: int, *, hopeful: bool = True) -> bool:
        """Returns True if a draft that would be cut to `length` tokens should have one more, as a probe. With
        `hopeful=False` it would not pay even if it were right: the probe shows only its cost."""
        self._waited += 1
        self._idle = False
        if self._waited < self._pause:
            self._idle = not length
            return False
        self._waited = 0
        self._probe = length + 1 if hopeful else 0
        self._pause = min(2 * self._pause, self._most_pause)
        return True

    def record(self, taken: int, accepted: int) -> None:
        """Records that of `taken` tokens, at least one, the first `accepted` were right."""
        if accepted >= self._probe > 0:
            self._pause = _FIRST_PAUSE
        self._probe = 0
        for index, tried in enumerate(self._tried):
            seen = index < taken and index <= accepted
            self._tried[index] = tried * _KEPT + seen
            self._right[index] = self._right[index] * _KEPT + (seen and index < accepted)
