"""Counts requests, tokens and slices. Knows no model and no clock; costs a microsecond a slice, read or not."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from protocol.stats import CacheCounts, RequestCounts, ScoreCounts, SliceCounts, Stats, TokenCounts
from runner.engine.policy import AdvanceTrial, Begin, Decode, Encode, Prefill, Slice

if TYPE_CHECKING:
    from runner.engine.generation import Generation
    from runner.engine.lifecycle import Lifecycle
    from runner.engine.request import Request

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAPS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_PREFILL_RATES = (10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000)
_DECODE_RATES = (1, 2.5, 5, 10, 20, 30, 40, 50, 75, 100, 150, 250, 500, 1000, 2500)


class Distribution(NamedTuple):
    """The number of values up to each bound and above the one before.

    `counts` has one entry more than `bounds`, for the values above all of them. `total` is the sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Distributions(NamedTuple):
    """The distributions over all requests so far, in seconds and in tokens per second."""

    ttft_s: Distribution
    gap_s: Distribution
    """The time between two steps of one answer."""
    queue_s: Distribution
    prefill_rate: Distribution
    decode_rate: Distribution


class EngineStats(NamedTuple):
    """The engine's numbers at one moment between two slices."""

    stats: Stats
    distributions: Distributions
    cache_mark: tuple[int, ...]
    """Differs from an earlier one if the nodes of the cache may differ."""


class Histogram:
    """A distribution that grows."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend."""
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def frozen(self) -> Distribution:
        """Returns a copy of the present state."""
        return Distribution(self._bounds, tuple(self._counts), self._total)


class Counters:
    """The counters of one engine. Owner: the engine thread. None of them ever decreases."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self._ttft = Histogram(_LATENCIES_S)
        self._gap = Histogram(_GAPS_S)
        self._queue = Histogram(_LATENCIES_S)
        self._prefill_rate = Histogram(_PREFILL_RATES)
        self._decode_rate = Histogram(_DECODE_RATES)
        self._stepped_s: dict[Generation, float | None] = {}  # when each running request last stepped
        self.ttft_s: float | None = None
        """The time to the first token of the last request that had one."""
        self._prompt = self._matched = self._cached = 0
        self.scores = ScoreCounts()
        self._generated = self._forced = self._known = 0  # by requests that have ended
        self._begins = self._prefills = self._prefill_tokens = self._encodes = self._steps = self._rows = 0
        self._prefill_s = self._encode_s = self._decode_s = 0.0
        self._former = CacheCounts()  # of caches that were replaced

    # --- counting

    def began(self, generation: "Generation") -> None:
        """Counts a request that has its session."""
        session = generation.session
        self._stepped_s[generation] = None
        self._prompt += session.total
        self._matched += session.matched
        self._cached += session.cached
        if generation.request.sampling.candidates:
            rows, tokens, cached = msgspec.structs.astuple(self.scores)
            self.scores = ScoreCounts(rows=rows + 1, tokens=tokens + session.total, cached=cached + session.cached)
        if session.miss:
            self.misses[session.miss.value] += 1
        self._queue.add(generation.life.waited_s)

    def stepped(self, generations: "Iterable[Generation]", now_s: float) -> None:
        """Counts a decode step, by which each of these has its next token."""
        last, add = self._stepped_s, self._gap.add
        for generation in generations:
            before = last.get(generation)
            if before is None:
                self._first(generation)
            else:
                add(now_s - before)
            last[generation] = now_s
            self._rows += 1

    def sliced(self, done: Slice, seconds: float) -> None:
        """Counts a slice."""
        match done:
            case Decode():
                self._steps += 1
                self._decode_s += seconds
            case Prefill(tokens=tokens):
                self._prefills += 1
                self._prefill_tokens += tokens
                self._prefill_s += seconds
            case Encode():
                self._encodes += 1
                self._encode_s += seconds
            case Begin():
                self._begins += 1
            case AdvanceTrial():
                pass

    def ended(self, generation: "Generation") -> "Lifecycle":
        """Counts a request that is closed. Returns its lifecycle, with the outcome."""
        life = generation.life
        if self._stepped_s.pop(generation, None) is None and life.first_token_ns:
            self._first(generation)  # a grammar has written all of its answer
        life.outcome = _outcome(generation.request, life.outcome)
        self.outcomes[life.outcome] += 1
        self._generated += life.generated
        self._forced += life.forced
        self._known += life.known
        if life.tokens_per_s:
            self._decode_rate.add(life.tokens_per_s)
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
        lives = [generation.life for generation in self._stepped_s]
        return TokenCounts(
            prompt=self._prompt,
            matched=self._matched,
            cached=self._cached,
            recomputed=self._prompt - self._cached,
            generated=self._generated + sum(life.generated for life in lives),
            forced=self._forced + sum(life.forced for life in lives),
        )

    @property
    def known(self) -> int:
        """The known choices that were taken, those of running requests included."""
        return self._known + sum(generation.life.known for generation in self._stepped_s)

    def slices(self) -> SliceCounts:
        """Returns the counts of slices."""
        return SliceCounts(
            begin=self._begins,
            prefill=self._prefills,
            encode=self._encodes,
            decode=self._steps,
            prefill_tokens=self._prefill_tokens,
            decode_rows=self._rows,
            prefill_s=self._prefill_s,
            encode_s=self._encode_s,
            decode_s=self._decode_s,
        )

    def cache(self, present: CacheCounts) -> CacheCounts:
        """Returns the counts of the present cache, with those of the caches before it and the misses added."""
        return msgspec.structs.replace(self._with_former(present), misses=dict(self.misses))

    def distributions(self) -> Distributions:
        """Returns copies of all histograms."""
        return Distributions(
            self._ttft.frozen(),
            self._gap.frozen(),
            self._queue.frozen(),
            self._prefill_rate.frozen(),
            self._decode_rate.frozen(),
        )

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
        self._ttft.add(life.ttft_s)
        if life.decoded_ns:
            self._prefill_rate.add(life.prefill_tokens_per_s(session.total - session.cached))


def _outcome(request: "Request", outcome: str) -> str:
    """Returns "refused" for a request whose grammar could not be compiled: its client was told so, and left."""
    grammar = request.grammar
    over = grammar is not None and grammar.done() and not grammar.cancelled()
    hopeless = over and grammar is not None and grammar.exception() is not None
    return "refused" if hopeless else outcome
