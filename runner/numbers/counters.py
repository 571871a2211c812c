"""The counters of an engine: requests, tokens and slices, and distributions over all requests. Knows no model."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import structs

from protocol.stats import CacheCounts, Histogram, RequestCounts, ScoreCounts, SliceCounts, Stats, TokenCounts
from runner.engine.answer_grammar import compile_error
from runner.engine.core import Observer
from runner.engine.policy import Begin, Decode, Encode, Prefill, Slice
from runner.errors import RequestError
from runner.numbers.figures import decode_rate, prefill_rate, ttft_s, waited_s

if TYPE_CHECKING:
    from runner.engine.generation import Generation
    from runner.engine.request import Request


_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_PREFILL_RATES = (10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000)
_DECODE_RATES = (1, 2.5, 5, 10, 20, 30, 40, 50, 75, 100, 150, 250, 500, 1000, 2500)


class Distribution:
    """The number of values up to each bound and above the one before, and above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """The sum of the values."""

    def count(self, value: float) -> None:
        """Counts a value."""
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
    """Differs from an earlier one if the nodes of the cache may differ."""


class Counters(Observer):
    """The counters of one engine. Owner: the engine thread.

    None of them ever decreases. They cost a microsecond a slice, read or not.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.distributions = Distributions.empty()
        self._stepped_s: dict[Generation, float | None] = {}  # when each running request last stepped
        self.ttft_s: float | None = None
        """The time to the first token of the last request that had one."""
        self._tokens = TokenCounts()  # those of answers only once they have ended, as the next
        self._known = 0
        self.scores = ScoreCounts()
        self.slices = SliceCounts()
        """Without the tokens and the time of prefills, which the scheduler counts."""
        self._former = CacheCounts()  # of caches that were replaced

    # --- counting

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
        if self._stepped_s.pop(generation, None) is None and life.first_token_ns:
            self._first(generation)  # a grammar has written all of its answer
        self.outcomes[outcome_of(generation.request, life.outcome)] += 1
        self._tokens.generated += life.generated
        self._tokens.forced += life.forced
        self._known += life.known
        if rate := decode_rate(life, life.ended_ns):
            self.distributions.decode_rate.count(rate)

    def never_began(self, request: "Request", outcome: str) -> None:
        self.outcomes[outcome_of(request, outcome)] += 1

    def count_former(self, counts: CacheCounts) -> None:
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
        return structs.replace(self._with_former(present), misses=dict(self.misses))

    def _with_former(self, counts: CacheCounts) -> CacheCounts:
        fields = ("evictions", "evicted_bytes", "restored_bytes")
        return structs.replace(counts, **{name: getattr(counts, name) + getattr(self._former, name) for name in fields})

    def _first(self, generation: "Generation") -> None:
        """Counts a request that has its first token."""
        self.ttft_s = ttft_s(generation.life)
        self.distributions.ttft_s.count(self.ttft_s)
        if generation.life.decoded_ns:
            self.distributions.prefill_rate.count(prefill_rate(generation))


def outcome_of(request: "Request", outcome: str) -> str:
    """Returns the outcome. If the grammar could not be compiled, it is that of the grammar: its client knows it, and
    has left."""
    error = compile_error(request.grammar)
    if error is None:
        return outcome
    return "refused" if isinstance(error, RequestError) else "failed"
