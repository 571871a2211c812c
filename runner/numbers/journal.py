"""The journal of an engine: log lines of requests, progress of prompts, and counters."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import structs

from protocol.stats import CacheCounts, Histogram, RequestCounts, ScoreCounts, SliceCounts, Stats, TokenCounts
from runner.engine.answer_grammar import compile_error
from runner.engine.core import Observer
from runner.engine.policy import Begin, Decode, Encode, Prefill, Slice
from runner.errors import RequestError
from runner.logs import Log
from runner.model.progress import Progress
from runner.numbers.cache import describe_cache
from runner.numbers.figures import decode_rate, prefill_rate, restored, ttft_s, waited_s
from runner.terminal import STATUS_LINE

if TYPE_CHECKING:
    from runner.cache import PrefixCache
    from runner.engine.generation import Generation
    from runner.engine.request import Request

log = Log(__name__)
_BAR = 20
Show = Callable[[str], bool]
"""Shows a line below the log, or removes the line if the text is empty. Returns False if it cannot show lines."""

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_PREFILL_RATES = (10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000)
_DECODE_RATES = (1, 2.5, 5, 10, 20, 30, 40, 50, 75, 100, 150, 250, 500, 1000, 2500)


class Distribution:
    """Counts of values. `counts[n]` is the number of values in (bounds[n - 1], bounds[n]]. The last count is of values
    above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` must ascend."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """The sum of the values."""

    def count(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def snapshot(self) -> "Distribution":
        """Returns a copy of the present state."""
        taken = Distribution(self.bounds)
        taken.counts, taken.total = [*self.counts], self.total
        return taken


class Distributions(NamedTuple):
    """The distributions over all requests so far, in seconds and in tokens per second."""

    ttft_s: Annotated[
        Distribution,
        Histogram("time_to_first_token_seconds", "Time from the arrival of a request to its first token."),
    ]
    gap_s: Annotated[
        Distribution, Histogram("inter_token_latency_seconds", "Time between two decode steps of one answer.")
    ]
    queue_s: Annotated[
        Distribution, Histogram("queue_time_seconds", "Time from the arrival of a request until it was computed.")
    ]
    prefill_rate: Annotated[
        Distribution,
        Histogram("prefill_tokens_per_second", "Computed prompt tokens per second; one value per request."),
    ]
    decode_rate: Annotated[
        Distribution, Histogram("decode_tokens_per_second", "Generated tokens per second; one value per request.")
    ]

    @classmethod
    def empty(cls) -> "Distributions":
        """Returns distributions of no values."""
        return cls(*map(Distribution, (_LATENCIES_S, _GAPS_S, _LATENCIES_S, _PREFILL_RATES, _DECODE_RATES)))


class EngineStats(NamedTuple):
    """The engine's numbers at one moment between two slices."""

    stats: Stats
    distributions: Distributions
    cache_mark: tuple[int, ...]
    """`CacheDescription.mark`: differs between two moments if the nodes of the cache may differ."""


class PromptProgress(Progress):
    """Reports the progress of a prompt that takes more than a second: as a bar on a terminal, else as lines in the log.
    Owner: the engine thread."""

    def __init__(self, request: int, total: int, cached: int, clock: Callable[[], float], show: Show) -> None:
        super().__init__(log, "prefill", total, cached, clock)
        self._request = request
        self._cached = cached
        self._show = show

    def end(self) -> None:
        """Removes the bar, if it is shown."""
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


class Journal(Observer):
    """The record of an engine's requests: log lines, progress, and counters, which never decrease. Takes a microsecond
    a slice. Owner: the engine thread."""

    def __init__(self, clock: Callable[[], float] = perf_counter, show: Show = STATUS_LINE.show) -> None:
        """`clock` returns seconds."""
        self.started_ns = perf_counter_ns()
        self._clock = clock
        self._show = show
        self._prompts: dict[Generation, PromptProgress] = {}
        self.outcomes: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.distributions = Distributions.empty()
        self._stepped_s: dict[Generation, float | None] = {}  # running request -> time of its last step, if any
        self.ttft_s: float | None = None
        """The time to the first token of the request that last got a first token."""
        self._tokens = TokenCounts()  # includes the tokens of answers that have ended, not of running answers
        self._known = 0  # the known first tokens of answers that have ended
        self.scores = ScoreCounts()
        self.slices = SliceCounts()
        """The counts of slices. `prefill_tokens` and `prefill_s` are 0 here: the scheduler has these numbers."""
        self._former = CacheCounts()  # the sums over caches that were replaced

    def began(self, generation: "Generation") -> None:
        session = generation.session
        self._stepped_s[generation] = None
        self._tokens.prompt += session.total
        self._tokens.matched += session.matched
        self._tokens.cached += session.cached
        self._tokens.recomputed += session.total - session.cached
        if generation.request.sampling.candidates:
            self.scores.rows += 1
            self.scores.tokens += session.total
            self.scores.cached += session.cached
        if session.miss:
            self.misses[session.miss.value] += 1
        self.distributions.queue_s.count(waited_s(generation.life))
        number = generation.request.number
        self._prompts[generation] = PromptProgress(number, session.total, session.cached, self._clock, self._show)

    def prefilled(self, generation: "Generation") -> None:
        prompt, position = self._prompts.get(generation), generation.session.position
        if prompt is None:
            return
        if position + 1 < prompt.total:
            prompt.add(position - prompt.done)
        if not generation.left:
            self._prompts.pop(generation).end()

    def stepped(self, generations: "Iterable[Generation]", now_s: float) -> None:
        last, count = self._stepped_s, self.distributions.gap_s.count
        for generation in generations:
            before = last.get(generation)
            if before is None:
                self._first(generation)
            else:
                count(now_s - before)
            last[generation] = now_s
            self.slices.decode_rows += 1

    def sliced(self, done: Slice, seconds: float) -> None:
        slices = self.slices
        match done:
            case Decode():
                slices.decode += 1
                slices.decode_s += seconds
            case Prefill():
                slices.prefill += 1
            case Encode():
                slices.encode += 1
                slices.encode_s += seconds
            case Begin():
                slices.begin += 1

    def ended(self, generation: "Generation") -> None:
        life = generation.life
        if prompt := self._prompts.pop(generation, None):
            prompt.end()
        if self._stepped_s.pop(generation, None) is None and life.first_token_ns:
            self._first(generation)  # the answer needed no step: its grammar forced all tokens
        self.outcomes[outcome_of(generation.request, life.outcome)] += 1
        self._tokens.generated += life.generated
        self._tokens.forced += life.forced
        self._known += life.known
        if rate := decode_rate(life, life.ended_ns):
            self.distributions.decode_rate.count(rate)
        log_end(generation)

    def never_began(self, request: "Request", outcome: str) -> None:
        self.outcomes[outcome_of(request, outcome)] += 1

    def cache_replaced(self, cache: "PrefixCache") -> None:
        self._former = self._with_former(describe_cache(cache).counts)

    @property
    def running(self) -> "list[Generation]":
        """The requests that have a session."""
        return list(self._stepped_s)

    def requests(self, queued: int) -> RequestCounts:
        """Returns the counts of requests. `queued` is the number of requests that wait."""
        return RequestCounts(running=len(self._stepped_s), queued=queued, **self.outcomes)

    def tokens(self) -> TokenCounts:
        """Returns the counts of tokens, including those of running requests."""
        tokens = copy(self._tokens)
        for generation in self._stepped_s:
            tokens.generated += generation.life.generated
            tokens.forced += generation.life.forced
        return tokens

    @property
    def known(self) -> int:
        """The number of first tokens that were known without a forward, including running requests."""
        return self._known + sum(generation.life.known for generation in self._stepped_s)

    def cache(self, present: CacheCounts) -> CacheCounts:
        """Returns the counts of the present cache, with the evictions, restored bytes and misses of all former ones."""
        return structs.replace(self._with_former(present), misses=dict(self.misses))

    def _with_former(self, counts: CacheCounts) -> CacheCounts:
        fields = ("evictions", "evicted_bytes", "restored_bytes")
        return structs.replace(counts, **{name: getattr(counts, name) + getattr(self._former, name) for name in fields})

    def _first(self, generation: "Generation") -> None:
        """Counts the times of a request that has just got its first token."""
        self.ttft_s = ttft_s(generation.life)
        self.distributions.ttft_s.count(self.ttft_s)
        if generation.life.decoded_ns:
            self.distributions.prefill_rate.count(prefill_rate(generation))


def outcome_of(request: "Request", outcome: str) -> str:
    """Returns the outcome that counts. If the request's grammar did not compile, that is the outcome: the client has
    read the reason and left, so the request's own outcome says cancelled."""
    error = compile_error(request.grammar)
    if error is None:
        return outcome
    return "refused" if isinstance(error, RequestError) else "failed"


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
