"""The share of earlier drafts that were right, for each position of a draft. Pure."""

from collections.abc import Iterator

_FIRST = (0.3, 0.5, 0.7, 0.8, 0.9)
"""For each `match_class`, the assumed probability that a draft's first token is right, until rounds are counted."""
_FIRST_WEIGHT = 2.0  # an assumed probability weighs as much as this many rounds
_KEPT = 1 - 1 / 24  # each round multiplies all earlier counts by this, so that old rounds fade
_ENOUGH = 8  # counts of this many rounds are trusted: drafts may then be longer than their match
_FIRST_PAUSE = 4  # the drafts between the first two probes
LOOKUP_PAUSE, BLOCK_PAUSE, MODEL_PAUSE = 64, 64, 256
"""The most drafts between two unsuccessful probes: of known text, of a model that drafts a block in one forward, and of
a model that drafts token by token. Their probes cost a sixth of a step, half a step, and up to two steps: the last kind
reads the end of the text, drafts, and has nothing dispatched ahead."""


def match_class(match: int) -> int:
    """Returns the class of a match by its tokens: 0 for 1-2, 1 for 3-4, 2 for 5-8, 3 for 9-16, 4 for more."""
    return min(max(match - 1, 1).bit_length() - 1, len(_FIRST) - 1)


class Acceptance:
    """The counts of right drafts from one source, with matches of one class. Owner: the engine thread.

    A round counts for a position only if all drafts before that position were right. Old counts fade, so a position
    without recent rounds is expected to do as well as the one before it, and is tried again. A *probe* is a draft that
    is cut one token later than the policy would cut it. Probes become rarer as long as none succeeds."""

    def __init__(self, match_class: int, most: int, most_pause: int = LOOKUP_PAUSE) -> None:
        """`most` is the length of the longest draft, and `most_pause` the most drafts between two probes."""
        self._most_pause = most_pause
        self._tried = [_FIRST_WEIGHT] + [0.0] * (most - 1)
        self._right = [_FIRST_WEIGHT * _FIRST[match_class]] + [0.0] * (most - 1)
        self._pause = _FIRST_PAUSE
        self._waited = 0
        self._probe = 0
        self._idle = False  # the last draft was cut to nothing

    @property
    def trusted(self) -> bool:
        """True if enough rounds are counted to draft more tokens than matched."""
        return self._tried[0] >= _ENOUGH

    def rates(self) -> Iterator[float]:
        """Yields for each position the probability that its token is right if all tokens before it are."""
        rate = self._right[0] / self._tried[0]
        yield rate
        for tried, right in zip(self._tried[1:], self._right[1:], strict=True):
            rate = (right + rate * _FIRST_WEIGHT) / (tried + _FIRST_WEIGHT)
            yield rate

    def rests(self) -> bool:
        """Returns True if the last draft was cut to nothing and no probe is due. The caller then skips the new draft
        without weighing it; the pause counts it as cut to nothing, too."""
        if not self._idle or self._waited + 1 >= self._pause:
            return False
        self._waited += 1
        return True

    def probes(self, length: int, *, hopeful: bool = True) -> bool:
        """Returns True if a draft that would be cut to `length` tokens should be one token longer, as a probe. With
        `hopeful=False` that token would not pay even if it were right: the probe only measures the token's cost."""
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
        """Records a round that tried `taken` tokens of a draft, at least one; the first `accepted` were right."""
        if accepted >= self._probe > 0:
            self._pause = _FIRST_PAUSE
        self._probe = 0
        for index, tried in enumerate(self._tried):
            seen = index < taken and index <= accepted
            self._tried[index] = tried * _KEPT + seen
            self._right[index] = self._right[index] * _KEPT + (seen and index < accepted)
