"""The results of one model, contender by contender."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from scripts.tools.bench.cache.contender import LayerBytes, Served
from scripts.tools.bench.cache.figures import CLOSE, Costs, Losses
from scripts.tools.bench.common.report import Table

BEST = "best possible"
"""The row of what a cache could have reused at most."""

_MB = 1e6
COLUMNS = (
    *("", "hit %", "matched", "computed", "lost", "p50", "p95", "max", f"<={CLOSE} %"),
    *("TTFT ms", "p95", "total s", "held MB", "peak", "/distinct", "states", "differ"),
)


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

    @property
    def table(self) -> Table:
        """The rows under one headline."""
        per_token, per_state = self.layer_bytes
        headline = (
            f"{self.kind}: {self.meaning}; {self.parameters / 1e6:.1f} M parameters, "
            f"{per_token:,} bytes per token, {per_state:,} per state"
        )
        return Table(headline, COLUMNS, [*map(_cells, self.rows)])

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


def _cells(row: Row) -> Sequence[str]:
    losses, costs = row.losses, row.costs
    lost = (losses.lost_tokens, losses.lost_p50, losses.lost_p95, losses.lost_max)
    cells = [row.name, f"{100 * losses.hit_rate:.1f}", f"{losses.matched_tokens:,}"]
    cells.append(f"{costs.computed_tokens:,}" if costs else "")
    cells += [*(f"{tokens:,}" for tokens in lost), f"{100 * losses.lost_close_share:.1f}"]
    if costs is None:
        return [*cells, *[""] * (len(COLUMNS) - len(cells))]
    return [
        *cells,
        f"{costs.ttft_ms_median:.1f}",
        f"{costs.ttft_ms_p95:.0f}",
        f"{costs.seconds:.1f}",
        f"{costs.held_bytes / _MB:.1f}",
        f"{costs.peak_bytes / _MB:.1f}",
        "-" if costs.held_ratio is None else f"{costs.held_ratio:.2f}",
        "-" if costs.held_states is None else f"{costs.held_states:.1f}",
        str(costs.mismatches),
    ]
