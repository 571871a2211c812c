"""Which of two ways of doing the same is the faster one, found out while it is done."""

_WINDOW_S = 0.1
_WINDOW_STEPS = 6
_STAY_S, _MOST_STAY_S = 2.0, 64.0
_GAIN = 0.98  # of the time: by less, noise decides


class Comparison:
    """Two ways take turns for a moment, then the faster one stays for a while, and longer each time it wins again.

    It knows durations and no clock. Steps are told by kind, of which only those in a row are comparable; a kind that
    changes all the time decides nothing.
    """

    def __init__(self) -> None:
        self.first = True
        """Whether the first way is the one to go."""
        self._kind = 0
        self._taken_s: dict[bool, float] = {}  # by the ways that have had their turn
        self._steps: list[float] = []
        self._moved = True  # the step that follows a change pays for it
        self._stay_s = 0.0
        self._next_stay_s = _STAY_S
        self._winner: bool | None = None

    def took(self, kind: int, seconds: float) -> None:
        """A step of this kind took so long, the present way."""
        if self._stay_s > 0:
            self._stay_s -= seconds
            return
        if kind != self._kind:
            self._kind = kind
            self._begin_turn()
            self._taken_s.clear()
            return
        if self._moved:
            self._moved = False
            return
        self._steps.append(seconds)
        if len(self._steps) >= _WINDOW_STEPS and sum(self._steps) >= _WINDOW_S:
            self._taken_s[self.first] = sorted(self._steps)[len(self._steps) // 2]
            self._begin_turn()
            if len(self._taken_s) < 2:
                self.first = not self.first
            else:
                self._decide()

    def _begin_turn(self) -> None:
        self._steps.clear()
        self._moved = True

    def _decide(self) -> None:
        """The way that had the later turn is the challenger: it has to be faster by more than noise."""
        challenger = self._taken_s[self.first] < _GAIN * self._taken_s[not self.first]
        self.first = self.first if challenger else not self.first
        self._next_stay_s = min(2 * self._next_stay_s, _MOST_STAY_S) if self.first is self._winner else _STAY_S
        self._winner = self.first
        self._stay_s = self._next_stay_s
        self._taken_s.clear()
