"""The report of `scripts/bench cache`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from scripts.tools.bench.cache.agent_trace import Workload
from scripts.tools.bench.cache.figures import CLOSE
from scripts.tools.bench.cache.rows import BEST, ModelReport, Row, cumulative
from scripts.tools.bench.common.figure import Bars, Chart, Lines
from scripts.tools.bench.common.report import Report, Table, Target

_HELD = 1.1

_NOTE = f"""hit %       tokens of prompts that came from the cache
matched     tokens of prompts that the cache had seen in their place; computed: that went through the model
lost        matched tokens that had to be computed again, over all requests; of one request p50, p95, max, and the share
            of requests that lost at most {CLOSE}
TTFT        time to the first token, median and 95th percentile; total: of all requests, closing the sessions included
held        bytes in the cache at the end, and their peak; /distinct: over the bytes that the distinct tokens seen take
            in layers that keep something per token ('-' where none does); states: what is held beyond those bytes, in
            states of all layers that have only a last state (recurrent, window, chunk)
differ      answers that are not equal to the first contender's
best, grid  by arithmetic on the same requests, nothing evicted: resuming anywhere; and only at multiples of 8192, 4
            tokens before the end of prompts and at ends of sequences; + branches: also where earlier requests parted"""


@dataclass(frozen=True)
class CacheReport(Report):
    """All of it. `budget_bytes` bounded each cache, None left them unbounded."""

    workload: Workload
    chunk_tokens: int
    budget_bytes: int | None
    models: list[ModelReport]

    @property
    def head(self) -> str:
        """The workload."""
        work = self.workload
        bound = "unbounded" if self.budget_bytes is None else f"{self.budget_bytes:,} bytes each"
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.models[0].counts.items()))
        return (
            f"{work.requests} requests of {work.agents} agents over {work.systems} system prompts, seed {work.seed}, "
            f"scale {work.scale:g}; caches {bound}; prefill in chunks of {self.chunk_tokens}\n{counts}"
        )

    @property
    def tables(self) -> Sequence[Table]:
        """One for each model."""
        return [model.table for model in self.models]

    @property
    def note(self) -> str:
        """The meaning of the columns."""
        return _NOTE

    @property
    def targets(self) -> list[Target]:
        """Of the trie, for the models that they are about."""
        found = []
        for model in self.models:
            costs = next((row.costs for row in model.contenders if row.name == "trie"), None)
            if costs is None:
                continue
            found.append(Target(f"{model.kind}: answers that differ", costs.mismatches, 0))
            if costs.held_ratio is not None and costs.held_states is None and self.budget_bytes is None:
                what = f"{model.kind}: bytes held over those of the distinct tokens"
                found.append(Target(what, costs.held_ratio, _HELD))
        return found

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {
            "workload": asdict(self.workload),
            "chunk_tokens": self.chunk_tokens,
            "budget_bytes": self.budget_bytes,
            "models": [model.data() for model in self.models],
        }

    @property
    def charts(self) -> Sequence[Chart]:
        """Hits, first tokens, and for each model the prompt tokens computed so far."""
        kinds, rows = [model.kind for model in self.models], [model.contenders for model in self.models]

        def of(value: Callable[[Row], float]) -> dict[str, list[float]]:
            return {row.name: [value(of_model[at]) for of_model in rows] for at, row in enumerate(rows[0])}

        hits = of(lambda row: 100 * row.losses.hit_rate)
        best = [next(100 * row.losses.hit_rate for row in model.rows if row.name == BEST) for model in self.models]
        first = of(lambda row: row.costs.ttft_ms_median if row.costs else 0.0)
        work = [
            Lines(
                f"{model.kind}: prompt tokens computed so far, thousands",
                {
                    row.name: [(at, tokens / 1e3) for at, tokens in enumerate(cumulative(row))]
                    for row in model.contenders
                },
                "requests",
            )
            for model in self.models
        ]
        return [
            Bars("prompt tokens from the cache, %", kinds, {**hits, BEST: best}),
            Bars("time to the first token, ms, median", kinds, first, log=True),
            *work,
        ]
