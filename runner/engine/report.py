"""The engine's numbers for people: requests, tokens, memory and the cache, for the page and the metrics."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
from msgspec import structs

from protocol.stats import (
    CacheNode,
    DiskCounts,
    DraftCounts,
    EmbeddingCounts,
    MediaCounts,
    MemoryCounts,
    RankCounts,
    RunningRequest,
    Stats,
)
from runner.engine.journal import EngineStats
from runner.engine.lifecycle import restored
from runner.tokenizer import Tokenizer
from runner.tokenizer.tokenizer import decode_utf8

if TYPE_CHECKING:
    from runner.engine.generation import Generation
    from runner.engine.request import Request
    from runner.engine.scheduler import Scheduler

_PREVIEW = 60
_MOST_SHOWN = 1 << 14  # tokens; those of a picture are shown as one
_ITEM = b"[media]"


class Identity(NamedTuple):
    """The facts about an engine that never change."""

    version: str
    model: str
    path: str
    architecture: str
    device: str
    context_length: int
    parallel: int
    cache_kind: str


@dataclass
class WingCounts:
    """The numbers of the wings; of one that is off, its zeros."""

    media: Callable[[], MediaCounts] = MediaCounts
    drafts: Callable[[], DraftCounts] = DraftCounts
    disk: Callable[[], DiskCounts] = DiskCounts
    ranks: Callable[[], RankCounts] = RankCounts
    embeddings: Callable[[], EmbeddingCounts] = EmbeddingCounts


class Report:
    """Reads the state of an engine between two slices, and changes nothing. Owner: the engine thread."""

    def __init__(
        self,
        identity: Identity,
        scheduler: "Scheduler",
        tokenizer: Tokenizer | None,
        wings: WingCounts,
    ) -> None:
        """With a `tokenizer`, cache nodes show the beginning of their text."""
        self._wings = wings
        self._identity = identity
        self._scheduler = scheduler
        self._spell = (lambda tokens: preview(tokenizer, tokens)) if tokenizer is not None else None
        self._started_ns = perf_counter_ns()

    def collect(self) -> EngineStats:
        """Returns all numbers."""
        counters, memory = self._scheduler.journal.counters, self._scheduler.memory
        cache, queued = self._scheduler.cache.describe(), self._scheduler.queue.requests
        now_ns = perf_counter_ns()
        stats = Stats(
            **self._identity._asdict(),
            uptime_s=_seconds(self._started_ns, now_ns),
            requests=counters.requests(len(queued)),
            tokens=counters.tokens(),
            scores=copy(counters.scores),
            cache=counters.cache(cache.counts),
            memory=MemoryCounts(
                used_bytes=mx.get_active_memory(),
                reusable_bytes=mx.get_cache_memory(),
                peak_bytes=memory.peak(),
                budget_bytes=memory.budget_bytes,
                weights_bytes=memory.weights_bytes,
            ),
            slices=copy(counters.slices),
            media=self._wings.media(),
            drafts=self._draft_counts(counters.known),
            disk=self._wings.disk(),
            ranks=self._wings.ranks(),
            embeddings=copy(self._wings.embeddings()),
            running=[
                *(_running(generation, now_ns) for generation in counters.running),
                *(_queued(request, now_ns) for request in queued),
            ],
            ttft_s=counters.ttft_s,
        )
        return EngineStats(stats, counters.distributions(), cache.mark)

    def _draft_counts(self, known: int) -> DraftCounts:
        counts = self._wings.drafts()
        if not known:
            return counts
        return structs.replace(
            counts, drafted={**counts.drafted, "known": known}, accepted={**counts.accepted, "known": known}
        )

    def nodes(self) -> list[CacheNode]:
        """Returns the nodes of the cache."""
        return self._scheduler.cache.nodes(self._spell)

    def memory_bytes(self) -> int:
        """Returns the bytes that MLX holds: in use, and kept for reuse."""
        return mx.get_active_memory() + mx.get_cache_memory()


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
        phase = "prefill" if generation.left or generation.grammar.compiled else "grammar"
        rate = max(0, prefilled - session.cached) / (max(1, now_ns - life.computed_ns) / 1e9)
    return RunningRequest(
        number=request.number,
        phase=phase,
        prompt=session.total,
        cached=session.cached,
        restored=restored(request, session),
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
    """Returns the first characters of the text of these tokens, on one line."""
    shown = [token for before, token in pairwise((0, *tokens[:_MOST_SHOWN])) if token >= 0 or token != before]
    data = b"".join(_ITEM if token < 0 else tokenizer.token_bytes(token) for token in shown[:_PREVIEW])
    return decode_utf8(data)[:_PREVIEW]
