"""What `scripts/bench cache` found of one model, contender by contender."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from scripts.tools.bench.cache.contender import LayerBytes, Served
from scripts.tools.bench.cache.figures import CLOSE, Costs, Losses

BEST = "best possible"
"""The row of what a cache could have reused at most."""

_MB = 1e6
_HEAD = (
    f"{'':<14}{'hit %':>6}{'matched':>8}{'computed':>9}{'lost':>7}{'p50':>6}{'p95':>6}{'max':>6}{f'<={CLOSE} %':>8}"
    f"{'TTFT ms':>8}{'p95':>7}{'total s':>8}{'held MB':>8}{'peak':>7}{'/distinct':>10}{'states':>7}{'differ':>7}"
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
