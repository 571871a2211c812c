"""A look at everything that the engine has, for the page and the metrics. Runs on its thread, between two slices."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from protocol.stats import CacheNode, MemoryCounts, RunningRequest, Stats
from runner.engine.memory.budget import MemoryBudget
from runner.engine.observe.counters import Published
from runner.tokenizer import Tokenizer
from runner.tokenizer.utf8 import decode

if TYPE_CHECKING:
    from runner.engine.generation import Generation
    from runner.engine.request import Request
    from runner.engine.scheduler import Scheduler

_PREVIEW = 60


class About(NamedTuple):
    """What does not change."""

    version: str
    model: str
    architecture: str
    device: str
    context_length: int
    cache_kind: str


class Report:
    """Looks, and changes nothing. Owner: the engine thread."""

    def __init__(self, about: About, running: "Scheduler", memory: MemoryBudget, tokenizer: Tokenizer | None) -> None:
        """With a tokenizer nodes show the beginning of their text."""
        self._about = about
        self._running = running
        self._memory = memory
        self._spell = (lambda tokens: preview(tokenizer, tokens)) if tokenizer is not None else None
        self._started_ns = perf_counter_ns()

    def publish(self) -> Published:
        """All numbers."""
        about, running = self._about, self._running
        counters, waiting, cache = running.journal.counters, running.journal.waiting, running.cache.describe()
        queued = [*waiting.behind, *waiting.queue]
        now_ns = perf_counter_ns()
        stats = Stats(
            version=about.version,
            model=about.model,
            architecture=about.architecture,
            device=about.device,
            context_length=about.context_length,
            cache_kind=about.cache_kind,
            uptime_s=_seconds(self._started_ns, now_ns),
            requests=counters.requests(len(queued)),
            tokens=counters.tokens(),
            cache=counters.cache(cache.counts),
            memory=_counted(self._memory),
            slices=counters.slices(),
            running=[
                *(_running(generation, now_ns) for generation in counters.running),
                *(_queued(request, now_ns) for request in queued),
            ],
            ttft_s=counters.ttft_s,
        )
        return Published(stats, counters.distributions(), cache.mark)

    def nodes(self) -> list[CacheNode]:
        """What the cache holds, node by node."""
        return self._running.cache.nodes(self._spell)


def _counted(memory: MemoryBudget) -> MemoryCounts:
    return MemoryCounts(
        used_bytes=mx.get_active_memory(),
        reusable_bytes=mx.get_cache_memory(),
        peak_bytes=memory.peak(),
        budget_bytes=memory.budget_bytes,
        weights_bytes=memory.weights_bytes,
    )


def _queued(request: "Request", now_ns: int) -> RunningRequest:
    return RunningRequest(
        number=request.number,
        phase="queued",
        prompt=len(request.prompt),
        max_tokens=request.max_tokens,
        age_s=_seconds(request.arrived_ns, now_ns),
    )


def _running(generation: "Generation", now_ns: int) -> RunningRequest:
    request, session, life = generation.request, generation.session, generation.life
    prefilled = min(session.position, session.total)
    if life.decoded_ns:
        phase, prefilled, rate = "decode", session.total, replace(life, ended_ns=now_ns).tokens_per_s
    else:
        phase = "prefill" if generation.left or generation.compiled else "grammar"
        rate = max(0, prefilled - session.cached) / (max(1, now_ns - life.computed_ns) / 1e9)
    return RunningRequest(
        number=request.number,
        phase=phase,
        prompt=session.total,
        cached=session.cached,
        prefilled=prefilled,
        generated=life.generated,
        max_tokens=request.max_tokens,
        age_s=_seconds(request.arrived_ns, now_ns),
        tokens_per_s=round(rate, 2),
        ttft_s=life.ttft_s if life.first_token_ns else None,
    )


def _seconds(since_ns: int, now_ns: int) -> float:
    return round((now_ns - since_ns) / 1e9, 3)


def preview(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The first characters of their text, on one line."""
    data = b"".join(tokenizer.token_bytes(token) for token in tokens[:_PREVIEW])
    return decode(data)[:_PREVIEW]
