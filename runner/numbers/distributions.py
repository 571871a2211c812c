"""Distributions of values over all requests, and the numbers of an engine at one moment."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from protocol.stats import Histogram, Stats

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
