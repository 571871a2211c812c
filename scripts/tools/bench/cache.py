"""`scripts/bench cache`: prefix caches side by side, on one tiny model for every kind of layer cache.

Several agents ask one model (`agent_trace`). Every request is served over each cache, in an order that rotates from
request to request, so that noise of the machine hits all alike; the answer of the first one goes on in the
conversations. All answers are drawn with the same seeds and should be equal: a difference is counted, for rounding can
tip a draw over when chunk boundaries differ.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

import mlx.core as mx

from runner.cache import CACHE_KINDS, make_cache
from runner.cache.session import LiveSession
from runner.engine.batch import Batch
from runner.engine.events import Text
from runner.engine.generation import Generation
from runner.engine.request import Request
from runner.sampling import SamplingOptions
from runner.tokenizer import Tokenizer
from scripts.tools.bench.agent_trace import FIRST_WORD, TURN_TOKENS, AgentTrace, Ask, Workload
from scripts.tools.bench.options import names_of, size_bytes
from scripts.tools.bench.report import Report, Table, Target, percentile
from scripts.tools.models.tiny import VOCAB, Tiny, tiny

_CONTEXT = 1 << 20
_TEMPERATURE, _TOP_K = 0.8, 4  # answers vary with the seed, and rounding noise seldom changes a draw among four
_NEVER = -1e9


class Served(NamedTuple):
    """One request: tokens of the prompt, milliseconds, bytes that the cache holds.

    `matched` and `cached` are what the session said, `computed` is how many tokens of the prompt went through the
    model. `ttft_ms` lasts from the beginning of the session until the first token was read, None without one;
    `ms` until the session was closed.
    """

    total: int
    matched: int
    cached: int
    computed: int
    ttft_ms: float | None
    ms: float
    held_bytes: int
    peak_bytes: int
    answer: list[int]

    @property
    def lost(self) -> int:
        """Tokens before the point of divergence that had to be computed again."""
        return self.matched - self.cached


class Contender:
    """One cache over the layers of a model. Serves one request at a time."""

    def __init__(self, model: Tiny, kind: str, budget_bytes: int | None = None) -> None:
        self.kind = kind
        self.cache = make_cache(kind, model.make_layers, budget_bytes=budget_bytes, turn_tokens=TURN_TOKENS)
        self._model = model.model
        self._words_only = mx.where(mx.arange(VOCAB) < FIRST_WORD, _NEVER, 0.0)

    def serve(self, ask: Ask) -> Served:
        forwarded, text, peak, ttft_ms = 0, "", 0, None

        def forward(tokens: mx.array, layers: list[object]) -> mx.array:
            nonlocal forwarded
            forwarded += tokens.shape[1]
            return self._model(tokens, cache=layers) + self._words_only

        started = perf_counter_ns()
        session = self.cache.begin(ask.prompt)
        assert isinstance(session, LiveSession)
        generation, decoding = Generation(_request(ask), session, _Numerals(), _CONTEXT, started), False
        group = Batch(generation, forward)
        try:
            while not generation.done and not _is_gone(ask, generation, forwarded):
                if not decoding and generation.left:
                    generation.prefill(CHUNK_TOKENS, forward)
                    peak = max(peak, self.cache.nbytes)
                    continue
                decoding = True
                for event in group.take(group.step())[0][1]:
                    if isinstance(event, Text):
                        ttft_ms = ttft_ms or (perf_counter_ns() - started) / 1e6
                        text += event.text
            peak = max(peak, self.cache.nbytes)
        except Exception as error:
            generation.fail(error)
            raise
        finally:
            generation.close()
        ms, held = (perf_counter_ns() - started) / 1e6, self.cache.nbytes
        return Served(
            total=session.total,
            matched=session.matched,
            cached=session.cached,
            computed=min(forwarded, len(session.remaining)),
            ttft_ms=ttft_ms,
            ms=ms,
            held_bytes=held,
            peak_bytes=max(peak, held),
            answer=[int(word) for word in text.split()],
        )


class _Numerals(Tokenizer):
    """Every token is its number in digits, so that the text of an answer tells its tokens."""

    def __init__(self) -> None:
        self.eos = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return b"%d " % token_id


def _request(ask: Ask) -> Request:
    sampling = SamplingOptions(temperature=_TEMPERATURE, top_k=_TOP_K, seed=ask.seed)
    return Request(prompt=ask.prompt, max_tokens=ask.answer_tokens, sampling=sampling, stops=None, metered=False)


def _is_gone(ask: Ask, generation: Generation, forwarded: int) -> bool:
    """Returns True if the client has left by now; the engine looks between two slices."""
    if ask.cancel is None:
        return False
    return forwarded >= ask.cancel * (len(generation.session.remaining) - 1)


KINDS = ("llama", "gemma3", "mamba2", "qwen3_next", "deepseek_v3", "llama4", "quantized")
"""Of scripts/tools/models/tiny.py: all keys, a window, states, both, one narrow head, chunks, 8 bits."""
CHUNK_TOKENS = 512
"""A quarter of the runner's, as the prompts are."""
_CACHES = ("none", "single", "trie")
_MB = 1e6
_COLUMNS = (
    "hit %",
    "matched",
    "computed",
    "lost",
    "lost p95",
    "TTFT ms",
    "TTFT p95",
    "total s",
    "held MB",
    "peak",
    "differ",
)
_NOTE = """hit %     tokens of prompts that came from the cache
matched   tokens of prompts that the cache had seen in their place; computed: that went through the model
lost      matched tokens that had to be computed again, over all requests; p95: of one
TTFT      time to the first token, median and 95th percentile; total: of all requests, closing the sessions included
held      bytes in the cache at the end, and their peak
differ    answers that are not equal to the first contender's"""


class Row(NamedTuple):
    """One cache under all requests of a trace. `mismatches` counts answers that differ from the first contender's."""

    cache: str
    served: Sequence[Served]
    mismatches: int

    def figures(self) -> dict[str, float]:
        """Returns the sums over all requests, cancelled ones included; times until the first token only where one was.

        `hit_rate` is cached / prompt. `lost` tokens stand before the point of divergence, yet had to be computed again:
        matched - cached, one of them at least where the whole prompt is known.
        """
        first = [one.ttft_ms for one in self.served if one.ttft_ms is not None]
        return {
            "hit_rate": sum(one.cached for one in self.served) / sum(one.total for one in self.served),
            "matched": sum(one.matched for one in self.served),
            "computed": sum(one.computed for one in self.served),
            "lost": sum(one.lost for one in self.served),
            "lost_p95": percentile([one.lost for one in self.served], 95),
            "ttft_ms": median(first) if first else 0.0,
            "ttft_ms_p95": percentile(first, 95),
            "seconds": sum(one.ms for one in self.served) / 1e3,
            "held_bytes": self.served[-1].held_bytes,
            "peak_bytes": max(one.peak_bytes for one in self.served),
            "mismatches": self.mismatches,
        }

    def cells(self) -> Sequence[str]:
        hit, matched, computed, lost, lost_p95, ttft, ttft_p95, seconds, held, peak, differ = self.figures().values()
        return (
            f"{100 * hit:.1f}",
            *(f"{tokens:,.0f}" for tokens in (matched, computed, lost, lost_p95)),
            *(f"{ttft:.1f}", f"{ttft_p95:.0f}", f"{seconds:.1f}"),
            *(f"{held / _MB:.1f}", f"{peak / _MB:.1f}", f"{differ:.0f}"),
        )


def report(
    workload: Workload, budget_bytes: int | None, counts: Mapping[str, int], models: Mapping[str, Sequence[Row]]
) -> Report:
    """Returns the results by kind of model; the targets are of the trie. `counts` says how often everything happened;
    `budget_bytes` bounded each cache."""
    bound = "unbounded" if budget_bytes is None else f"{budget_bytes:,} bytes each"
    title = (
        f"{workload.requests} requests of {workload.agents} agents over {workload.systems} system prompts, seed "
        f"{workload.seed}, scale {workload.scale:g}; caches {bound}\n"
        + ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    )
    rows = {(kind, row.cache): row for kind, each in models.items() for row in each}
    figures = {kind: {row.cache: row.figures() for row in each} for kind, each in models.items()}
    trie = {kind: row for (kind, cache), row in rows.items() if cache == "trie"}
    return Report(
        [Target(f"{kind}: answers that differ", row.mismatches, 0) for kind, row in trie.items()],
        [Table(title, ("", *_COLUMNS), [(f"{kind}, {cache}", *row.cells()) for (kind, cache), row in rows.items()])],
        {"workload": asdict(workload), "budget_bytes": budget_bytes, "counts": counts, "models": figures},
        _NOTE,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", choices=KINDS, help="this kind only; may be repeated")
    parser.add_argument(
        "--caches",
        type=names_of(CACHE_KINDS),
        default=",".join(_CACHES),
        metavar="KIND,...",
        help="the contenders; conversations go on with the answers of the first (default: %(default)s)",
    )
    parser.add_argument(
        "--cache-memory",
        type=lambda text: size_bytes(text, mx.get_memory_limit()),
        metavar="BYTES|N%",
        help="bound of each cache: 8MiB, 1G, or a share of MLX's memory limit (default: none)",
    )
    usual = Workload()
    parser.add_argument(
        "--requests", type=int, default=usual.requests, metavar="N", help="requests in all (default: %(default)s)"
    )
    parser.add_argument("--agents", type=int, default=usual.agents, metavar="N", help="agents (default: %(default)s)")
    parser.add_argument(
        "--scale", type=float, default=usual.scale, metavar="X", help="factor of all lengths (default: %(default)s)"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """The whole benchmark. `say` is told how far it is. ValueError when the options make no sense."""
    workload = Workload(
        seed=arguments.seed,
        requests=arguments.requests,
        agents=arguments.agents,
        scale=arguments.scale,
        vocabulary=VOCAB,
    )
    models, counts = {}, Counter[str]()
    for kind in arguments.model or KINDS:
        say(f"{kind} ...")
        models[kind], counts = measure(kind, workload, arguments.caches, arguments.cache_memory)
        mx.clear_cache()
    return report(workload, arguments.cache_memory, dict(counts), models)


def measure(
    kind: str, workload: Workload, caches: Sequence[str], budget_bytes: int | None
) -> tuple[list[Row], Counter[str]]:
    """Serves the workload to one model over every cache; also returns the counts of the trace."""
    contenders = [Contender(tiny(kind), cache, budget_bytes) for cache in caches]
    trace = AgentTrace(workload)
    served: list[list[Served]] = [[] for _ in contenders]
    while (ask := trace.next()) is not None:
        for turn in range(len(contenders)):
            index = (ask.number + turn) % len(contenders)
            served[index].append(contenders[index].serve(ask))
        trace.answer(None if ask.cancel is not None else served[0][-1].answer)
    first = [one.answer for one in served[0]]
    return [
        Row(cache, found, sum(one.answer != answer for one, answer in zip(found, first, strict=True)))
        for cache, found in zip(caches, served, strict=True)
    ], trace.counts
