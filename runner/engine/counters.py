"""Counts requests, tokens and slices. Knows no model and no clock; costs a microsecond a slice, read or not."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from protocol.stats import CacheCounts, Histogram, RequestCounts, ScoreCounts, SliceCounts, Stats, TokenCounts
from runner.engine.policy import Begin, Decode, Encode, Prefill, Slice

if TYPE_CHECKING:
    from runner.engine.generation import Generation
    from runner.engine.lifecycle import Lifecycle
    from runner.engine.request import Request

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
    """The counters of one engine. Owner: the engine thread. None of them ever decreases."""

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
        self._scores = ScoreCounts()
        self._slices = SliceCounts()
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
            self._scores.rows += 1
            self._scores.tokens += session.total
            self._scores.cached += session.cached
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
            self._slices.decode_rows += 1

    def sliced(self, done: Slice, seconds: float) -> None:
        """Counts a slice."""
        slices = self._slices
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

    def ended(self, generation: "Generation") -> "Lifecycle":
        """Counts a request that is closed. Returns its lifecycle, with the outcome."""
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
        return life

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

    def scores(self) -> ScoreCounts:
        """Returns the counts of rows of scores."""
        return copy(self._scores)

    @property
    def known(self) -> int:
        """The known choices that were taken, those of running requests included."""
        return self._known + sum(generation.life.known for generation in self._stepped_s)

    def slices(self) -> SliceCounts:
        """Returns the counts of slices."""
        return copy(self._slices)

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
    """Returns "refused" for a request whose grammar could not be compiled: its client was told so, and left."""
    grammar = request.grammar
    over = grammar is not None and grammar.done() and not grammar.cancelled()
    hopeless = over and grammar is not None and grammar.exception() is not None
    return "refused" if hopeless else outcome
