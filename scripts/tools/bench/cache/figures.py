"""The sums over the requests that one cache served."""

from collections.abc import Sequence
from typing import NamedTuple

from scripts.tools.bench.cache.contender import LayerBytes, Served
from scripts.tools.bench.cache.prefixes import Prefixes, Reuse
from scripts.tools.bench.common.report import percentile

CLOSE = 256
"""Tokens lost before the point of divergence that are thought little."""


class Losses(NamedTuple):
    """The reuse of prompts, in tokens over all requests, cancelled ones included.

    `hit_rate` is cached / prompt. Lost tokens stand before the point of divergence, yet had to be computed again:
    matched - cached, one of them at least where the whole prompt is known. `lost_close_share` is the share of requests
    that lost at most CLOSE.
    """

    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    hit_rate: float
    lost_tokens: int
    lost_p50: int
    lost_p95: int
    lost_max: int
    lost_close_share: float

    @classmethod
    def of(cls, prompts: Sequence[int], reuses: Sequence[Reuse]) -> "Losses":
        """`prompts` are their lengths."""
        lost = [reuse.matched - reuse.cached for reuse in reuses]
        cached = sum(reuse.cached for reuse in reuses)
        return cls(
            prompt_tokens=sum(prompts),
            matched_tokens=sum(reuse.matched for reuse in reuses),
            cached_tokens=cached,
            hit_rate=cached / sum(prompts),
            lost_tokens=sum(lost),
            lost_p50=percentile(lost, 50),
            lost_p95=percentile(lost, 95),
            lost_max=max(lost),
            lost_close_share=sum(tokens <= CLOSE for tokens in lost) / len(lost),
        )


class Costs(NamedTuple):
    """The cost of serving the requests.

    `computed_tokens` of prompts went through the model. TTFT lasts from the beginning of a session until the first
    token was read; `seconds` until the session was closed, over all requests. `held_bytes` is what the cache holds
    at the end. `distinct_tokens` were seen by its layers, those with an equal prefix counted once; `distinct_bytes`
    is what layers that keep something for every token need for them, so `held_ratio` = held / distinct is 1 where
    every token is stored once and nothing else; None where no layer keeps anything per token. `held_states` is what
    is held beyond that, in states of all whole-state layers; None without such layers. `mismatches` counts answers
    that differ from those of the first contender.
    """

    computed_tokens: int
    ttft_ms_median: float
    ttft_ms_p95: float
    seconds: float
    held_bytes: int
    peak_bytes: int
    distinct_tokens: int
    distinct_bytes: int
    held_ratio: float | None
    held_states: float | None
    mismatches: int

    @classmethod
    def of(cls, served: Sequence[Served], layer_bytes: LayerBytes, mismatches: int) -> "Costs":
        seen = Prefixes()
        for one in served:
            seen.add(one.shown)
        held, distinct = served[-1].held_bytes, len(seen) * layer_bytes.per_token
        first = [one.ttft_ms for one in served if one.ttft_ms is not None]
        return cls(
            computed_tokens=sum(one.computed for one in served),
            ttft_ms_median=percentile(first, 50),
            ttft_ms_p95=percentile(first, 95),
            seconds=sum(one.ms for one in served) / 1e3,
            held_bytes=held,
            peak_bytes=max(one.peak_bytes for one in served),
            distinct_tokens=len(seen),
            distinct_bytes=distinct,
            held_ratio=held / distinct if distinct else None,
            held_states=max(0, held - distinct) / layer_bytes.per_state if layer_bytes.per_state else None,
            mismatches=mismatches,
        )
