"""Compares drafting and plain decoding by the clock alone; the slower one rests.

One of these two *ways* is in use. Now and then the other way is checked. In a check, *windows* of some steps of both
ways alternate. The check fails if the checked way is not better in a window; if it is better in several, it comes into
use. After a failed check the next one waits for many times the cost of the check. That rest grows with each failure,
and more so if the checked way is much slower.

The check compares seconds a token. It counts only steps with a draft at hand, and the step after such a step, which may
have to wait because of the draft."""

from typing import Literal, NamedTuple

_CLEAR_STEPS, _CLEAR = 4, 1.4  # a window ends after 4 steps if a token lasts 1.4 times as long as in the way in use
_WINDOWS = 3  # the number of windows in which the checked way must be better to come into use
_BETTER = 0.98  # "better" means at most this share of the other way's seconds a token
_FIRST_REST, _MOST_REST = 16, 128  # the first rest and the longest rest after a check, as multiples of its cost
_LEAST_COST = 1 / 8  # the least cost of a check, as a share of the time of a window
_SPEED_WEIGHT = 1 / 16  # the weight of the latest step in the average step of its way
_MOST_SPIKE = 4  # a step counts as at most this many average steps: a longer one has other reasons
_WEIGHT = 0.5  # the weight of the latest window in the average of its way


class CheckState(NamedTuple):
    """The state of drafting ("resting" means plain decoding is in use), and the reason for it."""

    name: Literal["on", "resting", "off"]
    why: str


class _Way:
    """The times of one way to decode: averages, and the sums of the present window."""

    def __init__(self) -> None:
        self.token_s = 0.0
        """The average seconds a token over the windows of this way; 0 until its first window ends."""
        self.step_s = 0.0
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0

    def begin(self) -> None:
        self.steps = self.tokens = 0
        self.seconds = 0.0

    def count(self, tokens: int, seconds: float) -> None:
        if self.step_s:
            seconds = min(seconds, self.step_s * _MOST_SPIKE)
            self.step_s += (seconds - self.step_s) * _SPEED_WEIGHT
        else:
            self.step_s = seconds
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds

    def end(self, weight: float) -> None:
        """Ends the window, which gets this weight in the average."""
        token_s = self.seconds / self.tokens
        self.token_s = self.token_s + (token_s - self.token_s) * weight if self.token_s else token_s


class SpeedCheck:
    """Decides for all requests of the process whether steps may draft. Owner: the engine thread."""

    def __init__(self, window: int) -> None:
        """Begins with drafting in use, and soon checks plain decoding. `window` is the number of steps of a window."""
        self._window = window
        self._drafts = _Way()
        self._plain = _Way()
        self._used = self._drafts
        self._now = self._drafts
        self._better = 0  # the number of windows of this check in which the checked way was better
        self._cost_s = 0.0  # the seconds by which this check has delayed answers
        self._rest: float = _FIRST_REST
        self._rest_s = 0.0  # the seconds of counted steps until the next check
        self._changed = True
        self._was_offered = False
        self._off = ""

    def allows(self) -> bool:
        """Returns True if the next step may draft. Look for drafts even if not, since `record` needs `offered`."""
        return self._now is self._drafts and not self._off

    def turn_off(self, why: str) -> None:
        self._off = why

    @property
    def state(self) -> CheckState:
        """The state of drafting and the reason. A check does not change it before it ends."""
        if self._off:
            return CheckState("off", self._off)
        if not (self._drafts.token_s and self._plain.token_s):
            return CheckState("on", "not compared yet")
        ratio = f"a token takes {self._drafts.token_s / self._plain.token_s:.2f} times as long as without drafts"
        return CheckState("on" if self._used is self._drafts else "resting", ratio)

    def record(self, tokens: int, seconds: float, *, drafted: bool, offered: bool) -> None:
        """Records a step that yielded `tokens` tokens, at least one. `drafted` is True if it tried a draft, `offered`
        if a draft was at hand."""
        counts = offered or self._was_offered
        self._was_offered = offered
        if self._off or not counts or (offered and drafted != self.allows()):
            return
        if self._changed:  # the first step of a way differs from the others
            self._changed = False
            return
        self._now.count(tokens, seconds)
        if self._now is not self._used:
            is_clear = self._now.steps >= _CLEAR_STEPS and self._now.seconds > self._expected_s() * _CLEAR
            if is_clear or self._now.steps == self._window:
                self._compare()
            return
        self._rest_s -= seconds
        if self._now.steps == self._window:
            self._now.end(_WEIGHT)
            self._turn_to(self._other if self._better or self._rest_s <= 0 else self._used)

    @property
    def _other(self) -> _Way:
        return self._plain if self._used is self._drafts else self._drafts

    def _expected_s(self) -> float:
        """Returns the seconds in which the way in use would have yielded the tokens of this window."""
        return self._used.token_s * self._now.tokens

    def _compare(self) -> None:
        """Ends a window of the checked way, and the check if this decides it."""
        checked, used = self._now, self._used
        self._cost_s += checked.seconds - self._expected_s()
        checked.end(_WEIGHT if self._better else 1.0)
        if checked.token_s > used.token_s * _BETTER:
            ratio = checked.token_s / used.token_s
            self._rest = min(max(2.0, ratio * ratio) * self._rest, _MOST_REST)
            self._end_check(max(self._cost_s, used.token_s * self._window * _LEAST_COST))
        elif self._better + 1 < _WINDOWS:
            self._better += 1
            self._turn_to(used)
        else:
            self._used = checked
            self._rest = _FIRST_REST
            self._end_check(checked.seconds * _LEAST_COST)

    def _end_check(self, cost_s: float) -> None:
        self._rest_s = self._rest * cost_s
        self._better = 0
        self._cost_s = 0.0
        self._turn_to(self._used)

    def _turn_to(self, way: _Way) -> None:
        self._changed = self._now is not way
        self._now = way
        way.begin()
