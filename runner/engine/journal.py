"""Notes what happens to requests: counts it, and logs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from runner.engine import lifecycle
from runner.engine.counters import Counters
from runner.engine.queue import RequestQueue
from runner.engine.request import Request
from runner.logs import Log
from runner.terminal import STATUS_LINE

if TYPE_CHECKING:
    from runner.engine.generation import Generation

log = Log(__name__)

# --- Decides when to report the progress of a long prompt, and what to report.

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


_BAR = 20


class Journal:
    """The scheduler's record of its requests. Owner: the engine thread."""

    def __init__(
        self,
        queue: RequestQueue,
        progress: ProgressReporter | None = None,
        show: Callable[[str], bool] = STATUS_LINE.show,
    ) -> None:
        """`queue` has the requests that have no session yet. `show` puts a line below the log, or returns False if
        there is no place for one."""
        self.queue = queue
        self.counters = Counters()
        self._progress = progress or ProgressReporter()
        self._show = show

    def began(self, generation: "Generation") -> None:
        """Notes that a request has its session."""
        session = generation.session
        self.counters.began(generation)
        self._progress.begin(generation.request.number, session.total, session.cached)

    def prefilled(self, generation: "Generation") -> None:
        """Notes that a slice of its prompt was computed."""
        number = generation.request.number
        progress = self._progress.advance(number, generation.session.position)
        if progress is not None:
            self._report(progress)
        elif not generation.left:
            self._end_progress(number)

    def ended(self, generation: "Generation") -> None:
        """Notes that a request is closed."""
        self._end_progress(generation.request.number)
        lifecycle.report(generation.request, generation.session, self.counters.ended(generation))

    def never_began(self, requests: Sequence[Request], outcome: str) -> None:
        """Notes that requests ended before they had a session."""
        for request in requests:
            self.counters.never_began(request, outcome)

    def _end_progress(self, number: int) -> None:
        if self._progress.end(number):
            self._show("")

    def _report(self, progress: PromptProgress) -> None:
        if not self._show(bar(progress)):
            log.info(
                "prefill",
                request=progress.request,
                percent=progress.percent,
                done=progress.done,
                total=progress.total,
                tokens_per_s=round(progress.tokens_per_s, 1),
                seconds_left=round(progress.seconds_left, 1),
            )


def bar(progress: PromptProgress) -> str:
    """Returns `prefill 7 [#####               ] 25 %  512 tokens/s  12 s left`, where 7 is the request's number."""
    full = _BAR * progress.done // max(1, progress.total)
    blocks = f"[{'#' * full:<{_BAR}}]"
    rates = f"{progress.tokens_per_s:.0f} tokens/s  {progress.seconds_left:.0f} s left"
    return f"prefill {progress.request} {blocks} {progress.percent:>2} %  {rates}"
