"""`scripts/bench cache`: prefix caches side by side, on one model for every kind of layer cache.

Several agents ask one model (`agent_trace`). Every request is served over each cache, in an order that rotates from
request to request, so that noise of the machine hits all alike; the answer of the first one goes on in the
conversations. All answers are drawn with the same seeds and should be equal: a difference is counted, for rounding can
tip a draw over when chunk boundaries differ.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import NamedTuple, Protocol

import mlx.core as mx

from runner.cache import CACHE_KINDS
from runner.model.weights.dtype import device
from scripts.tools.bench.cache.agent_trace import AgentTrace, Ask, Workload
from scripts.tools.bench.cache.contender import Contender, Served
from scripts.tools.bench.cache.models import KINDS, Size, make_subject
from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.options import names_of, size_bytes
from scripts.tools.bench.common.report import Report, Table, Target, percentile

HIDDEN, LAYERS = 256, 2
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


class Server(Protocol):
    """A contender, or what stands for one."""

    def serve(self, ask: Ask) -> Served:
        """Computes the answer to one request."""
        ...


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
        """Returns the figures as a row of the table."""
        hit, matched, computed, lost, lost_p95, ttft, ttft_p95, seconds, held, peak, differ = self.figures().values()
        return (
            f"{100 * hit:.1f}",
            *(f"{tokens:,.0f}" for tokens in (matched, computed, lost, lost_p95)),
            *(f"{ttft:.1f}", f"{ttft_p95:.0f}", f"{seconds:.1f}"),
            *(f"{held / _MB:.1f}", f"{peak / _MB:.1f}", f"{differ:.0f}"),
        )


@dataclass(frozen=True)
class CacheReport(Report):
    """By kind of model. `counts` says how often everything happened; `budget_bytes` bounded each cache."""

    workload: Workload
    budget_bytes: int | None
    counts: Mapping[str, int]
    models: Mapping[str, Sequence[Row]]

    @property
    def targets(self) -> list[Target]:
        """Of the trie."""
        return [
            Target(f"{kind}: answers that differ", row.mismatches, 0)
            for kind, rows in self.models.items()
            for row in rows
            if row.cache == "trie"
        ]

    @property
    def tables(self) -> Sequence[Table]:
        """One table for all models."""
        work = self.workload
        bound = "unbounded" if self.budget_bytes is None else f"{self.budget_bytes:,} bytes each"
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        title = (
            f"{work.requests} requests of {work.agents} agents over {work.systems} system prompts, seed {work.seed}, "
            f"scale {work.scale:g}; caches {bound}\n{counts}"
        )
        rows = [(f"{kind}, {row.cache}", *row.cells()) for kind, rows in self.models.items() for row in rows]
        return [Table(title, ("", *_COLUMNS), rows)]

    @property
    def note(self) -> str:
        """The meaning of the columns, and of the kinds of models."""
        return "\n".join([_NOTE, *(f"{kind:10}{KINDS[kind]}" for kind in self.models)])

    def data(self) -> Mapping[str, object]:
        """For JSON: the figures of each cache, and one value for each request."""
        names = ("total", "matched", "cached", "computed", "ttft_ms", "ms", "held_bytes")
        return {
            "workload": asdict(self.workload),
            "budget_bytes": self.budget_bytes,
            "counts": self.counts,
            "models": {
                kind: {
                    row.cache: {
                        **row.figures(),
                        "requests": {name: [getattr(one, name) for one in row.served] for name in names},
                    }
                    for row in rows
                }
                for kind, rows in self.models.items()
            },
        }

    @property
    def charts(self) -> Sequence[Chart]:
        """Hits, and first tokens."""
        figures = [[row.figures() for row in rows] for rows in self.models.values()]
        caches = [row.cache for row in next(iter(self.models.values()))]

        def of(name: str, scale: float = 1.0) -> dict[str, list[float]]:
            return {cache: [scale * rows[at][name] for rows in figures] for at, cache in enumerate(caches)}

        return [
            Bars("prompt tokens from the cache, %", list(self.models), of("hit_rate", 100)),
            Bars("time to the first token, ms, median", list(self.models), of("ttft_ms"), log=True),
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    kinds = "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items())
    parser.add_argument(
        "--model", action="append", choices=KINDS, metavar="KIND", help=f"this one only, may be repeated: {kinds}"
    )
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


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> CacheReport:
    """The whole benchmark. `say` is told how far it is. ValueError when the options make no sense."""
    workload = Workload(
        seed=arguments.seed, requests=arguments.requests, agents=arguments.agents, scale=arguments.scale
    )
    if device() == "cpu":
        mx.disable_compile()  # as the runner does
    models, counts = {}, Counter[str]()
    for kind in arguments.model or KINDS:
        say(f"{kind} ...")
        models[kind], counts = measure(kind, workload, arguments.caches, arguments.cache_memory)
        mx.clear_cache()
    return CacheReport(workload, arguments.cache_memory, dict(counts), models)


def measure(
    kind: str, workload: Workload, caches: Sequence[str], budget_bytes: int | None
) -> tuple[list[Row], Counter[str]]:
    """Serves the workload to one model over every cache; also returns the counts of the trace."""
    subject = make_subject(kind, Size(HIDDEN, LAYERS, workload.vocabulary), workload.seed)
    contenders = [
        Contender(subject, cache, chunk=CHUNK_TOKENS, vocabulary=workload.vocabulary, budget_bytes=budget_bytes)
        for cache in caches
    ]
    served, counts = serve_all(AgentTrace(workload), contenders)
    first = [one.answer for one in served[0]]
    return [
        Row(cache, found, sum(one.answer != answer for one, answer in zip(found, first, strict=True)))
        for cache, found in zip(caches, served, strict=True)
    ], counts


def serve_all(trace: AgentTrace, contenders: Sequence[Server]) -> tuple[list[list[Served]], Counter[str]]:
    """Serves every request of a trace on every contender, in rotating order; also returns the counts of the trace."""
    served: list[list[Served]] = [[] for _ in contenders]
    while (ask := trace.next()) is not None:
        for turn in range(len(contenders)):
            index = (ask.number + turn) % len(contenders)
            served[index].append(contenders[index].serve(ask))
        trace.answer(None if ask.cancel is not None else served[0][-1].answer)
    return served, trace.counts
