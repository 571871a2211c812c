"""`GET /metrics`: the engine's numbers in the text format of Prometheus.

Nothing is kept between two scrapes: the counters are the engine's own. The module is imported at the first scrape,
since prometheus_client takes a tenth of a start.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from protocol.stats import Stats
from runner.cache.interface import Miss
from runner.engine.counters import Distribution, Distributions, EngineStats
from runner.engine.lifecycle import OUTCOMES

_PREFIX = "mlx_runner_"


class Exporter(Collector):
    """A collector with a registry of its own. Not thread-safe: its owner calls `text` once at a time."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._published: EngineStats | None = None
        self._registry.register(self)

    def text(self, published: EngineStats, accept: str) -> tuple[bytes, str]:
        """Returns the body and its content type, for a scraper that sends this `Accept` header."""
        self._published = published
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        if self._published is not None:
            stats = self._published.stats
            for metrics in (
                _about,
                _requests,
                _tokens,
                _scores,
                _cache,
                _memory,
                _slices,
                _pictures,
                _drafts,
                _disk,
                _ranks,
            ):
                yield from metrics(stats)
            yield from _distributions(self._published.distributions)


def _about(stats: Stats) -> Iterator[Metric]:
    info = {
        "version": stats.version,
        "model": stats.model,
        "architecture": stats.architecture,
        "device": stats.device,
        "cache": stats.cache_kind,
    }
    yield InfoMetricFamily(_PREFIX.rstrip("_"), "The runner and its model.", value=info)
    yield _gauge("uptime_seconds", "Seconds since the model was loaded.", stats.uptime_s)
    yield _gauge("context_tokens", "Most tokens that prompt and answer may have together.", stats.context_length)


def _requests(stats: Stats) -> Iterator[Metric]:
    counts = stats.requests
    ended = [((outcome,), getattr(counts, outcome)) for outcome in OUTCOMES]
    yield _counters("requests", "Requests that have ended, by outcome.", ("outcome",), ended)
    yield _gauge("requests_running", "Requests being computed.", counts.running)
    yield _gauge("requests_queued", "Requests waiting to be computed.", counts.queued)


def _tokens(stats: Stats) -> Iterator[Metric]:
    tokens = stats.tokens
    prompt = [(("cache",), tokens.cached), (("computed",), tokens.recomputed)]
    yield _counters(
        "prompt_tokens", "Prompt tokens, by source: reused from the cache or computed.", ("source",), prompt
    )
    yield _counter(
        "matched_tokens",
        "Prompt tokens that matched a cached prefix, whether or not they could be reused.",
        tokens.matched,
    )
    generated = [(("sampled",), tokens.generated - tokens.forced), (("forced",), tokens.forced)]
    yield _counters(
        "generated_tokens", "Generated tokens, by source: sampled, or forced by a grammar.", ("source",), generated
    )


def _scores(stats: Stats) -> Iterator[Metric]:
    scores = stats.scores
    tokens = [(("cache",), scores.cached), (("computed",), scores.tokens - scores.cached)]
    yield _counter("score_rows", "Requests that were rows of scores.", scores.rows)
    yield _counters("score_tokens", "Prompt tokens of these, by source.", ("source",), tokens)


def _cache(stats: Stats) -> Iterator[Metric]:
    cache = stats.cache
    held = [(("live",), cache.live_bytes), (("paged",), cache.paged_bytes)]
    yield _gauges(
        "cache_bytes", "Bytes held by the cache: live in the buffers of layers, or paged out of them.", ("state",), held
    )
    yield _gauge("cache_nodes", "Nodes of the prefix trie.", cache.nodes)
    if cache.budget_bytes is not None:
        yield _gauge("cache_budget_bytes", "Most bytes that the cache may hold.", cache.budget_bytes)
    yield _counter("cache_evictions", "Nodes evicted to make room.", cache.evictions)
    yield _counter("cache_evicted_bytes", "Bytes evicted to make room.", cache.evicted_bytes)
    yield _counter("cache_restored_bytes", "Bytes restored into the buffers of layers.", cache.restored_bytes)
    misses = [((str(reason),), cache.misses.get(reason, 0)) for reason in Miss if reason]
    yield _counters(
        "cache_misses", "Requests that reused less of the cache than they might have, by reason.", ("reason",), misses
    )


def _memory(stats: Stats) -> Iterator[Metric]:
    memory = stats.memory
    yield _gauge("memory_used_bytes", "Device memory in use.", memory.used_bytes)
    yield _gauge("memory_reusable_bytes", "Freed memory that MLX keeps for new arrays.", memory.reusable_bytes)
    yield _gauge("memory_peak_bytes", "Most device memory ever in use.", memory.peak_bytes)
    yield _gauge("memory_weights_bytes", "Memory taken by the weights.", memory.weights_bytes)
    if memory.budget_bytes is not None:
        yield _gauge("memory_budget_bytes", "Most device memory that may be in use.", memory.budget_bytes)


def _pictures(stats: Stats) -> Iterator[Metric]:
    pictures = stats.pictures
    yield _counter("pictures_encoded", "Pictures that went through the tower.", pictures.encoded)
    yield _counter("picture_tokens", "Tokens that these took in prompts.", pictures.soft_tokens)
    yield _counter("picture_seconds", "Time spent in the tower.", pictures.encode_s)
    yield _counter("picture_feature_hits", "Pictures whose features were still known.", pictures.feature_hits)
    yield _gauge("picture_feature_bytes", "Memory taken by features of pictures.", pictures.feature_bytes)
    yield _gauge("picture_pixel_bytes", "Memory taken by pixels that wait for the tower.", pictures.pixel_bytes)


def _drafts(stats: Stats) -> Iterator[Metric]:
    drafts = stats.drafts
    yield _counter("draft_rounds", "Decode steps that tried drafts.", drafts.rounds)
    for name, help_, tokens in (
        ("drafted_tokens", "Tokens that were tried before they were drawn, by source.", drafts.drafted),
        ("accepted_tokens", "Drafted tokens that were right, by source.", drafts.accepted),
    ):
        yield _counters(name, help_, ("source",), [((source,), count) for source, count in tokens.items()])


def _disk(stats: Stats) -> Iterator[Metric]:
    disk = stats.disk
    yield _gauge("disk_held_bytes", "Files of all models in the directory of the disk cache.", disk.held_bytes)
    yield _gauge("disk_budget_bytes", "The most that these may take.", disk.budget_bytes)
    yield _gauge("disk_segments", "Files of this model.", disk.segments)
    yield _gauge("disk_pending_tokens", "Tokens in memory that are not on disk.", disk.pending_tokens)
    yield _counter("disk_written_bytes", "Bytes written.", disk.written_bytes)
    yield _counter("disk_read_bytes", "Bytes read.", disk.read_bytes)
    yield _counter("disk_evicted_bytes", "Bytes removed to make room, or because of their age.", disk.evicted_bytes)
    yield _counter("disk_restores", "Requests for which something was restored.", disk.restores)
    yield _counter("disk_restored_tokens", "Tokens restored.", disk.restored_tokens)
    yield _counter("disk_restore_seconds", "Time that requests waited for these.", disk.restore_s)
    yield _counter("disk_copy_seconds", "The engine's time that writing took.", disk.copy_s)
    yield _counter("disk_write_errors", "Files that could not be written.", disk.write_errors)
    yield _counter("disk_checks", "Restored segments that were computed again, to compare.", disk.checks)
    yield _counter("disk_failed_checks", "Those that were something else.", disk.failed_checks)
    rejected = [((reason,), count) for reason, count in disk.rejected.items()]
    yield _counters("disk_rejected", "Files that were refused, by reason.", ("reason",), rejected)


def _ranks(stats: Stats) -> Iterator[Metric]:
    ranks = stats.ranks
    yield _gauge("ranks", "Processes that compute the model together; 0 if one has all of it.", len(ranks.members))
    yield _gauge("rank_latency_seconds", "Of a sum of 16 KB over all ranks, at the start.", ranks.latency_us / 1e6)
    yield _counter("rank_tape_bytes", "Sent to each follower, so that it computes the same.", ranks.tape_bytes)
    held = [((str(member.rank),), member.memory_bytes) for member in ranks.members]
    yield _gauges("rank_memory_bytes", "Memory in use by MLX, by rank.", ("rank",), held)


def _slices(stats: Stats) -> Iterator[Metric]:
    slices = stats.slices
    kinds = [
        (("begin",), slices.begin),
        (("prefill",), slices.prefill),
        (("encode",), slices.encode),
        (("decode",), slices.decode),
    ]
    yield _counters("slices", "Slices of computation, by kind.", ("kind",), kinds)
    seconds = [(("prefill",), slices.prefill_s), (("encode",), slices.encode_s), (("decode",), slices.decode_s)]
    yield _counters("slice_seconds", "Time spent in slices, by kind.", ("kind",), seconds)
    tokens = [(("prefill",), slices.prefill_tokens), (("decode",), slices.decode_rows)]
    yield _counters("slice_tokens", "Tokens computed in slices, by kind.", ("kind",), tokens)


def _distributions(of: Distributions) -> Iterator[Metric]:
    yield _histogram("time_to_first_token_seconds", "Time from the arrival of a request to its first token.", of.ttft_s)
    yield _histogram("inter_token_latency_seconds", "Time between two decode steps of one answer.", of.gap_s)
    yield _histogram("queue_time_seconds", "Time from the arrival of a request until it was computed.", of.queue_s)
    yield _histogram(
        "prefill_tokens_per_second",
        "Computed prompt tokens per second; one value per request.",
        of.prefill_rate,
    )
    yield _histogram("decode_tokens_per_second", "Generated tokens per second; one value per request.", of.decode_rate)


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, help_, value=value)


def _gauges(name: str, help_: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, help_, labels=labels)
    for names, value in values:
        family.add_metric(names, value)
    return family


def _counter(name: str, help_: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, help_, value=value)


def _counters(
    name: str, help_: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, help_, labels=labels)
    for names, value in values:
        family.add_metric(names, value)
    return family


def _histogram(name: str, help_: str, values: Distribution) -> Metric:
    edges = [*map(floatToGoString, values.bounds), "+Inf"]
    buckets = list(zip(edges, map(float, accumulate(values.counts)), strict=True))
    return HistogramMetricFamily(_PREFIX + name, help_, buckets=buckets, sum_value=values.total)
