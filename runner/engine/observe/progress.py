"""Decides when to report the progress of a long prompt, and what to report."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

_EVERY_S = 1.0


class PromptProgress(NamedTuple):
    """The part of one prompt that has been computed."""

    request: int
    done: int
    """Tokens, the cached ones included."""
    total: int
    tokens_per_s: float
    seconds_left: float

    @property
    def percent(self) -> int:
        """The part that is done, rounded down, so that 100 means all."""
        return 100 * self.done // max(1, self.total)


@dataclass(slots=True)
class _Prompt:
    total: int
    cached: int
    begun_s: float
    reported_s: float


class ProgressReporter:
    """Reports the progress of a prompt that takes more than a second, about once a second until it is computed.

    Returns reports, and writes nothing itself; knows no model. Owner: the engine thread.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._prompts: dict[int, _Prompt] = {}

    def begin(self, request: int, total: int, cached: int) -> None:
        """Notes that a prompt of `total` tokens, of which `cached` are known already, begins now."""
        now = self._clock()
        self._prompts[request] = _Prompt(total, cached, now, now)

    def advance(self, request: int, done: int) -> PromptProgress | None:
        """Notes that `done` tokens are computed, the cached ones included. Returns what to report, if it is time to."""
        prompt = self._prompts.get(request)
        now = self._clock()
        if prompt is None or done + 1 >= prompt.total or now - prompt.reported_s < _EVERY_S:
            return None
        prompt.reported_s = now
        rate = (done - prompt.cached) / (now - prompt.begun_s)
        left = (prompt.total - done) / rate if rate > 0 else float("inf")
        return PromptProgress(request, done, prompt.total, rate, left)

    def end(self, request: int) -> bool:
        """Forgets a prompt that is computed or no longer wanted. Returns True if it was ever reported."""
        prompt = self._prompts.pop(request, None)
        return prompt is not None and prompt.reported_s > prompt.begun_s
