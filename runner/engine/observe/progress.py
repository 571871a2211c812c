"""How far long prompts are: when that is said, and what."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

_EVERY_S = 1.0


class Reading(NamedTuple):
    """How far a prompt is."""

    request: int
    done: int
    """Tokens, the cached ones included."""
    total: int
    tokens_per_s: float
    seconds_left: float

    @property
    def percent(self) -> int:
        """Rounded down: 100 is said of what is over."""
        return 100 * self.done // max(1, self.total)


@dataclass(slots=True)
class _Prompt:
    total: int
    cached: int
    begun_s: float
    said_s: float


class PrefillProgress:
    """Says how far a prompt is once it has taken a second, and then about once a second until all of it is read.

    Says, does not write; knows no model. Owner: the engine thread.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._prompts: dict[int, _Prompt] = {}

    def begin(self, request: int, total: int, cached: int) -> None:
        """So many tokens are to be read, of which so many are known already."""
        now = self._clock()
        self._prompts[request] = _Prompt(total, cached, now, now)

    def passed(self, request: int, done: int) -> Reading | None:
        """So many are there, the cached ones included; returns what is to be said of it now."""
        prompt = self._prompts.get(request)
        now = self._clock()
        if prompt is None or done + 1 >= prompt.total or now - prompt.said_s < _EVERY_S:
            return None
        prompt.said_s = now
        rate = (done - prompt.cached) / (now - prompt.begun_s)
        left = (prompt.total - done) / rate if rate > 0 else float("inf")
        return Reading(request, done, prompt.total, rate, left)

    def end(self, request: int) -> bool:
        """It is read, or nobody wants it any more. Returns whether anything was said of it."""
        prompt = self._prompts.pop(request, None)
        return prompt is not None and prompt.said_s > prompt.begun_s
