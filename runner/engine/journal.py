"""The journal of an engine: counts requests, tokens and slices, and logs requests. Knows no model."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from protocol.stats import CacheCounts, Histogram, RequestCounts, ScoreCounts, SliceCounts, Stats, TokenCounts
from runner.engine.answer_grammar import compile_error
from runner.engine.lifecycle import restored
from runner.engine.policy import Begin, Decode, Encode, Prefill, Slice
from runner.errors import RequestError
from runner.logs import Log
from runner.terminal import STATUS_LINE

if TYPE_CHECKING:
    from runner.engine.generation import Generation
    from runner.engine.request import Request

log = Log(__name__)

# --- Counts.

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_PREFILL_RATES = (10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000)
_DECODE_RATES = (1, 2.5, 5, 10, 20, 30, 40, 50, 75, 100, 150, 250, 500, 1000, 2500)


class Distribution:
    """The number of values up to each bound and above the one before, and above all bounds."""

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0) -> None:
        """`bounds` ascend. `total` is the sum of the values."""
        self.bounds = tuple(bounds)
        self.counts = [*counts] or [0] * (len(bounds) + 1)
        self.total = total

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> "Distribution":
        """Returns a copy of the present state."""
        return Distribution(self.bounds, self.counts, self.total)


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


class EngineStats(NamedTuple):
    """The engine's numbers at one moment between two slices."""

    stats: Stats
    distributions: Distributions
    cache_mark: tuple[int, ...]
    """Differs from an earlier one if the nodes of the cache may differ."""


class Counters:
    """The counters of one engine. Owner: the engine thread.

    None of them ever decreases. They cost a microsecond a slice, read or not.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self._distributions = Distributions(
            ttft_s=Distribution(_LATENCIES_S),
            gap_s=Distribution(_GAPS_S),
            queue_s=Distribution(_LATENCIES_S),
            prefill_rate=Distribution(_PREFILL_RATES),
            decode_rate=Distribution(_DECODE_RATES),
        )
        self._stepped_s: dict[Generation, float | None] = {}  # when each running request last stepped
        self.ttft_s: float | None = None
        """The time to the first token of the last request that had one."""
        self._tokens = TokenCounts()  # those of answers only once they have ended, as the next
        self._known = 0
        self.scores = ScoreCounts()
        self.slices = SliceCounts()
        self._former = CacheCounts()  # of caches that were replaced

    # --- counting

    def began(self, generation: "Generation") -> None:
        """Counts a request that has its session."""
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
        self._distributions.queue_s.add(generation.life.waited_s)

    def stepped(self, generations: "Iterable[Generation]", now_s: float) -> None:
        """Counts a decode step, by which each of these has its next token."""
        last, add = self._stepped_s, self._distributions.gap_s.add
        for generation in generations:
            before = last.get(generation)
            if before is None:
                self._first(generation)
            else:
                add(now_s - before)
            last[generation] = now_s
            self.slices.decode_rows += 1

    def sliced(self, done: Slice, seconds: float) -> None:
        """Counts a slice."""
        slices = self.slices
        match done:
            case Decode():
                slices.decode += 1
                slices.decode_s += seconds
            case Prefill(tokens=tokens):
                slices.prefill += 1
                slices.prefill_tokens += tokens
                slices.prefill_s += seconds
            case Encode():
                slices.encode += 1
                slices.encode_s += seconds
            case Begin():
                slices.begin += 1

    def ended(self, generation: "Generation") -> None:
        """Counts a request that is closed."""
        life = generation.life
        if self._stepped_s.pop(generation, None) is None and life.first_token_ns:
            self._first(generation)  # a grammar has written all of its answer
        life.outcome = _outcome(generation.request, life.outcome)
        self.outcomes[life.outcome] += 1
        self._tokens.generated += life.generated
        self._tokens.forced += life.forced
        self._known += life.known
        if life.tokens_per_s:
            self._distributions.decode_rate.add(life.tokens_per_s)

    def never_began(self, request: "Request", outcome: str) -> None:
        """Counts a request that ended before it had a session."""
        self.outcomes[_outcome(request, outcome)] += 1

    def cache_replaced(self, counts: CacheCounts) -> None:
        """Adds the counts of a cache that is being replaced to those of its successors."""
        self._former = self._with_former(counts)

    # --- reading

    @property
    def running(self) -> "list[Generation]":
        """The requests that have a session."""
        return list(self._stepped_s)

    def requests(self, queued: int) -> RequestCounts:
        """Returns the counts of requests; `queued` more are waiting."""
        return RequestCounts(running=len(self._stepped_s), queued=queued, **self.outcomes)

    def tokens(self) -> TokenCounts:
        """Returns the counts of tokens, those of running requests included."""
        tokens = copy(self._tokens)
        for generation in self._stepped_s:
            tokens.generated += generation.life.generated
            tokens.forced += generation.life.forced
        return tokens

    @property
    def known(self) -> int:
        """The first tokens that were known, those of running requests included."""
        return self._known + sum(generation.life.known for generation in self._stepped_s)

    def cache(self, present: CacheCounts) -> CacheCounts:
        """Returns the counts of the present cache, with those of the caches before it and the misses added."""
        return msgspec.structs.replace(self._with_former(present), misses=dict(self.misses))

    def distributions(self) -> Distributions:
        """Returns copies of all distributions."""
        return Distributions(*(values.copy() for values in self._distributions))

    def _with_former(self, counts: CacheCounts) -> CacheCounts:
        return msgspec.structs.replace(
            counts,
            evictions=counts.evictions + self._former.evictions,
            evicted_bytes=counts.evicted_bytes + self._former.evicted_bytes,
            restored_bytes=counts.restored_bytes + self._former.restored_bytes,
        )

    def _first(self, generation: "Generation") -> None:
        """Counts a request that has its first token."""
        life, session = generation.life, generation.session
        self.ttft_s = life.ttft_s
        self._distributions.ttft_s.add(life.ttft_s)
        if life.decoded_ns:
            self._distributions.prefill_rate.add(life.prefill_tokens_per_s(session.total - session.cached))


def _outcome(request: "Request", outcome: str) -> str:
    """Returns the outcome; of a request whose grammar could not be compiled that of the grammar, as its client knows
    it and has left."""
    error = compile_error(request.grammar)
    if error is None:
        return outcome
    return "refused" if isinstance(error, RequestError) else "failed"


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
        """Notes that a prompt of `total` tokens begins now; the first `cached` ones are known."""
        now = self._clock()
        self._prompts[request] = _Prompt(total, cached, now, now)

    def report(self, request: int, done: int) -> PromptProgress | None:
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


# --- The journal.


class Journal:
    """The scheduler's record of its requests. Owner: the engine thread."""

    def __init__(
        self, progress: ProgressReporter | None = None, show: Callable[[str], bool] = STATUS_LINE.show
    ) -> None:
        """`show` puts a line below the log, or returns False if there is no place for one."""
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
        progress = self._progress.report(number, generation.session.position)
        if progress is None:
            if not generation.left:
                self._end_progress(number)
        elif not self._show(bar(progress)):
            log.info(
                "prefill",
                request=progress.request,
                percent=progress.percent,
                done=progress.done,
                total=progress.total,
                tokens_per_s=round(progress.tokens_per_s, 1),
                seconds_left=round(progress.seconds_left, 1),
            )

    def ended(self, generation: "Generation") -> None:
        """Notes that a request is closed."""
        self._end_progress(generation.request.number)
        self.counters.ended(generation)
        log_end(generation)

    def _end_progress(self, number: int) -> None:
        if self._progress.end(number):
            self._show("")


def log_end(generation: "Generation") -> None:
    """Writes the log line of a request that has ended."""
    request, session, life = generation.request, generation.session, generation.life
    log.info(
        "completion",
        request=request.number,
        outcome=life.outcome,
        total=session.total,
        matched=session.matched,
        cached=session.cached,
        restored=restored(request, session),
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
        waited_ms=round(life.waited_s * 1e3, 1),
        ttft_ms=round(life.ttft_s * 1e3, 1),
        prefill_tokens_per_s=round(life.prefill_tokens_per_s(session.total - session.cached), 1),
        tokens_per_s=round(life.tokens_per_s, 1),
    )


_BAR = 20


def bar(progress: PromptProgress) -> str:
    """Returns `prefill 7 [#####               ] 25 %  512 tokens/s  12 s left`, where 7 is the request's number."""
    full = _BAR * progress.done // max(1, progress.total)
    blocks = f"[{'#' * full:<{_BAR}}]"
    rates = f"{progress.tokens_per_s:.0f} tokens/s  {progress.seconds_left:.0f} s left"
    return f"prefill {progress.request} {blocks} {progress.percent:>2} %  {rates}"
