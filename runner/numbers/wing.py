"""Makes an engine's observer, and collects all numbers between two slices. Owner: the engine thread."""

from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from time import perf_counter_ns

from msgspec import structs

from protocol.stats import CacheNode, DraftCounts, MemoryCounts, RankCounts, Stats
from runner import __version__
from runner.engine.parts import Parts, Wing
from runner.numbers.cache import cache_nodes, describe_cache
from runner.numbers.figures import queued_figures, running_figures, seconds_between
from runner.numbers.journal import Distributions, EngineStats, Journal
from runner.tokenizer import Tokenizer
from runner.tokenizer.detokenizer import decode_utf8

_PREVIEW = 60
_MOST_SHOWN = 1 << 14  # the tokens that are looked at: a picture has many, but is shown as one word
_ITEM = b"[media]"


class NumbersWing(Wing):
    """Provides the log lines of requests, statistics and metrics."""

    name = "numbers"

    def plug(self, parts: Parts) -> None:
        parts.observer = Journal()


def collect(parts: Parts) -> EngineStats:
    """Returns the engine's numbers at this moment."""
    journal, scheduler, now_ns = parts.observer, parts.scheduler, perf_counter_ns()
    assert isinstance(journal, Journal)
    cache, memory, waiting = describe_cache(scheduler.cache), scheduler.memory, scheduler.queue.requests
    used_bytes, reusable_bytes = parts.held_bytes
    slices, ranks = copy(journal.slices), parts.ranks
    slices.prefill_tokens, slices.prefill_s = scheduler.prefilled_tokens, scheduler.prefill_s
    stats = Stats(
        version=__version__,
        model=parts.model.title,
        path=parts.model.directory,
        architecture=parts.model.architecture,
        device="cpu" if parts.on_cpu else "gpu",
        context_length=parts.model.context_length,
        parallel=scheduler.parallel,
        cache_kind=parts.settings.cache,
        uptime_s=seconds_between(journal.started_ns, now_ns),
        requests=journal.requests(len(waiting)),
        tokens=journal.tokens(),
        scores=copy(journal.scores),
        cache=journal.cache(cache.counts),
        memory=MemoryCounts(
            used_bytes=used_bytes,
            reusable_bytes=reusable_bytes,
            peak_bytes=memory.peak(),
            budget_bytes=memory.budget_bytes,
            weights_bytes=memory.weights_bytes,
        ),
        slices=slices,
        media=parts.counts.media(),
        drafts=_with_known(parts.counts.drafts(), journal.known),
        disk=parts.counts.disk(),
        ranks=ranks.counts() if ranks is not None else RankCounts(),
        embeddings=copy(parts.counts.embeddings()),
        running=[
            *(running_figures(generation, now_ns) for generation in journal.running),
            *(queued_figures(request, now_ns) for request in waiting),
        ],
        ttft_s=journal.ttft_s,
    )
    distributions = Distributions(*(each.snapshot() for each in journal.distributions))
    return EngineStats(stats, distributions, cache.mark)


def _with_known(counts: DraftCounts, known: int) -> DraftCounts:
    if not known:
        return counts
    tokens = {"known": known}
    return structs.replace(counts, drafted=counts.drafted | tokens, accepted=counts.accepted | tokens)


def draw_cache(parts: Parts) -> list[CacheNode]:
    """Returns the nodes of the cache. With `--inspect-text`, each node has the beginning of its text."""
    spell = (lambda tokens: preview_text(parts.tokenizer, tokens)) if parts.settings.inspect_text else None
    return cache_nodes(parts.scheduler.cache, spell)


def preview_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Returns the first 60 characters of the text of these tokens, with `[media]` for each item."""
    shown = [token for before, token in pairwise((0, *tokens[:_MOST_SHOWN])) if token >= 0 or token != before]
    data = b"".join(_ITEM if token < 0 else tokenizer.token_bytes(token) for token in shown[:_PREVIEW])
    return decode_utf8(data)[:_PREVIEW]
