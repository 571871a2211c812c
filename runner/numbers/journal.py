"""The journal of an engine: logs its requests and the progress of their prompts, and counts them."""

from collections.abc import Callable
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING

from runner.logs import Log
from runner.model.progress import Progress
from runner.numbers.cache import describe_cache
from runner.numbers.counters import Counters, outcome_of
from runner.numbers.figures import decode_rate, prefill_rate, restored, ttft_s, waited_s
from runner.terminal import STATUS_LINE

if TYPE_CHECKING:
    from runner.cache import PrefixCache
    from runner.engine.generation import Generation

log = Log(__name__)
_BAR = 20
Show = Callable[[str], bool]
"""Puts a line below the log, which an empty text removes; returns False if there is no place for one."""


class PromptProgress(Progress):
    """The progress of a prompt that takes more than a second, the cached tokens included: a bar on a terminal, or lines
    of the log. Owner: the engine thread."""

    def __init__(self, request: int, total: int, cached: int, clock: Callable[[], float], show: Show) -> None:
        super().__init__(log, "prefill", total, cached, clock)
        self._request = request
        self._cached = cached
        self._show = show

    def end(self) -> None:
        """Removes the bar."""
        if self.reported:
            self._show("")

    def _report(self, done: int, percent: int, seconds: float) -> None:
        rate = (done - self._cached) / seconds
        left_s = (self.total - done) / rate if rate > 0 else float("inf")
        full = _BAR * done // max(1, self.total)
        numbers = f"{percent:>2} %  {rate:.0f} tokens/s  {left_s:.0f} s left"
        if not self._show(f"prefill {self._request} [{'#' * full:<{_BAR}}] {numbers}"):
            log.info(
                "prefill",
                request=self._request,
                percent=percent,
                done=done,
                total=self.total,
                tokens_per_s=round(rate, 1),
                seconds_left=round(left_s, 1),
            )


class Journal(Counters):
    """The record of an engine's requests. Owner: the engine thread."""

    def __init__(self, clock: Callable[[], float] = perf_counter, show: Show = STATUS_LINE.show) -> None:
        """`clock` gives seconds."""
        super().__init__()
        self.started_ns = perf_counter_ns()
        self._clock = clock
        self._show = show
        self._prompts: dict[Generation, PromptProgress] = {}

    def began(self, generation: "Generation") -> None:
        super().began(generation)
        number, session = generation.request.number, generation.session
        self._prompts[generation] = PromptProgress(number, session.total, session.cached, self._clock, self._show)

    def prefilled(self, generation: "Generation") -> None:
        prompt, position = self._prompts.get(generation), generation.session.position
        if prompt is None:
            return
        if position + 1 < prompt.total:
            prompt.add(position - prompt.done)
        if not generation.left:
            self._prompts.pop(generation).end()

    def ended(self, generation: "Generation") -> None:
        if prompt := self._prompts.pop(generation, None):
            prompt.end()
        super().ended(generation)
        log_end(generation)

    def cache_replaced(self, cache: "PrefixCache") -> None:
        self.count_former(describe_cache(cache).counts)


def log_end(generation: "Generation") -> None:
    """Writes the log line of a request that has ended."""
    request, session, life = generation.request, generation.session, generation.life
    log.info(
        "completion",
        request=request.number,
        outcome=outcome_of(request, life.outcome),
        total=session.total,
        matched=session.matched,
        cached=session.cached,
        restored=restored(generation),
        left=session.total - session.cached,
        miss=session.miss,
        evicted_bytes=session.evicted_bytes,
        scored=len(request.sampling.candidates),
        generated=life.generated,
        forced=life.forced,
        known=life.known,
        drafted=life.drafted,
        accepted=life.accepted,
        model_drafted=life.model_drafted,
        model_accepted=life.model_accepted,
        waited_ms=round(waited_s(life) * 1e3, 1),
        ttft_ms=round(ttft_s(life) * 1e3, 1),
        prefill_tokens_per_s=round(prefill_rate(generation), 1),
        tokens_per_s=round(decode_rate(life, life.ended_ns), 1),
    )
