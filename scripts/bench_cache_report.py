"""What `scripts/bench cache` found: as a table, as JSON and as a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from scripts.agent_trace import Workload
from scripts.bench_cache_figures import CLOSE, Costs, Losses
from scripts.bench_contender import LayerBytes, Served

BEST = "best possible"
"""The row of what a cache could have reused at most."""

_MB = 1e6
_HEAD = (
    f"{'':<14}{'hit %':>6}{'matched':>8}{'computed':>9}{'lost':>7}{'p50':>6}{'p95':>6}{'max':>6}{f'<={CLOSE} %':>8}"
    f"{'TTFT ms':>8}{'p95':>7}{'total s':>8}{'held MB':>8}{'peak':>7}{'/distinct':>10}{'states':>7}{'differ':>7}"
)
_LEGEND = f"""
hit %       tokens of prompts that came from the cache
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


class Row(NamedTuple):
    """A contender; without costs and requests where it is arithmetic only."""

    name: str
    losses: Losses
    costs: Costs | None = None
    served: Sequence[Served] = ()


class ModelReport(NamedTuple):
    """One model. `operations` has what led to each request, `counts` how often everything happened."""

    kind: str
    meaning: str
    parameters: int
    layer_bytes: LayerBytes
    operations: list[str]
    counts: dict[str, int]
    rows: list[Row]

    @property
    def contenders(self) -> list[Row]:
        """The rows that were measured."""
        return [row for row in self.rows if row.costs is not None]

    def table(self) -> str:
        """The rows under one headline."""
        per_token, per_state = self.layer_bytes
        headline = (
            f"{self.kind}: {self.meaning}; {self.parameters / 1e6:.1f} M parameters, "
            f"{per_token:,} bytes per token, {per_state:,} per state"
        )
        return "\n".join([headline, _HEAD, *map(_line, self.rows)])

    def data(self) -> dict[str, object]:
        """For JSON: the figures of `Losses` and `Costs`, and what happened in each request."""
        return {
            "model": self.kind,
            "parameters": self.parameters,
            "bytes_per_token": self.layer_bytes.per_token,
            "bytes_per_state": self.layer_bytes.per_state,
            "counts": self.counts,
            "operations": self.operations,
            "caches": {row.name: _data(row) for row in self.contenders},
            "arithmetic": {row.name: row.losses._asdict() for row in self.rows if row.costs is None},
        }


class CacheReport(NamedTuple):
    """All of it. `budget_bytes` bounded each cache, None left them unbounded."""

    workload: Workload
    chunk_tokens: int
    budget_bytes: int | None
    models: list[ModelReport]

    def table(self) -> str:
        """One table per model, and what the columns mean."""
        work = self.workload
        bound = "unbounded" if self.budget_bytes is None else f"{self.budget_bytes:,} bytes each"
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.models[0].counts.items()))
        head = (
            f"{work.requests} requests of {work.agents} agents over {work.systems} system prompts, seed {work.seed}, "
            f"scale {work.scale:g}; caches {bound}; prefill in chunks of {self.chunk_tokens}\n{counts}"
        )
        return "\n\n".join([head, *(model.table() for model in self.models)]) + "\n" + _LEGEND

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {
            "workload": asdict(self.workload),
            "chunk_tokens": self.chunk_tokens,
            "budget_bytes": self.budget_bytes,
            "models": [model.data() for model in self.models],
        }

    def plot(self, path: Path) -> None:
        """Draws the picture."""
        from scripts.bench_cache_plot import draw

        draw(self.models, path)


def cumulative(row: Row) -> list[int]:
    """Prompt tokens computed up to and with each request."""
    return list(accumulate(one.computed for one in row.served))


def _data(row: Row) -> dict[str, object]:
    assert row.costs is not None
    requests = {
        name: [getattr(one, name) for one in row.served]
        for name in ("total", "matched", "cached", "computed", "ttft_ms", "ms", "held_bytes")
    }
    return {**row.losses._asdict(), **row.costs._asdict(), "requests": requests}


def _line(row: Row) -> str:
    losses, costs = row.losses, row.costs
    computed = f"{costs.computed_tokens:,}" if costs else ""
    line = (
        f"{row.name:<14}{100 * losses.hit_rate:>6.1f}{losses.matched_tokens:>8,}{computed:>9}{losses.lost_tokens:>7,}"
        f"{losses.lost_p50:>6,}{losses.lost_p95:>6,}{losses.lost_max:>6,}{100 * losses.lost_close_share:>8.1f}"
    )
    if costs is None:
        return line
    ratio = "-" if costs.held_ratio is None else f"{costs.held_ratio:.2f}"
    states = "-" if costs.held_states is None else f"{costs.held_states:.1f}"
    times = f"{costs.ttft_ms_median:>8.1f}{costs.ttft_ms_p95:>7.0f}{costs.seconds:>8.1f}"
    held = f"{costs.held_bytes / _MB:>8.1f}{costs.peak_bytes / _MB:>7.1f}{ratio:>10}{states:>7}"
    return f"{line}{times}{held}{costs.mismatches:>7}"
