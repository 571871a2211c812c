"""The report of `scripts/bench memory`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scripts.tools.bench.common.contenders import OURS
from scripts.tools.bench.common.figure import Chart, Lines
from scripts.tools.bench.common.report import Report, Table, Target
from scripts.tools.bench.memory.growth import Sample, Slope
from scripts.tools.bench.memory.sharing import Shape

HELD_TARGET = 1.10
RISE_TARGET = 0.02
_MB = 1e6
_NOTE = """held         in this process, as each cache counts itself; x: over the bytes of all distinct tokens
processes    growth since a first prompt of the length of the prefix was answered; told: MLX's memory in /v1/status;
             resident: of the whole process, less where it had room left from that first prompt
growth       a straight line through the second half of the prompts; KB: of 1,000 bytes"""


class Growth(NamedTuple):
    """A process before and after the conversations."""

    before: Sample
    after: Sample

    @property
    def resident(self) -> int:
        """Bytes more."""
        return self.after.rss - self.before.rss

    @property
    def told(self) -> int | None:
        """Bytes more, where it tells."""
        return None if self.before.told is None or self.after.told is None else self.after.told - self.before.told


@dataclass(frozen=True)
class MemoryReport(Report):
    """`held`: bytes after each request, by cache; `processes` by server, and `samples` over many prompts."""

    shape: Shape
    budget: str
    token_bytes: int = 0
    held: Mapping[str, Sequence[int]] = field(default_factory=dict)
    processes: Mapping[str, Growth] = field(default_factory=dict)
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)

    @property
    def distinct(self) -> int:
        """Bytes of all tokens at the end, each counted once."""
        return self.token_bytes * self.shape.distinct(self.shape.conversations * self.shape.turns)

    @property
    def targets(self) -> Sequence[Target]:
        """Of ours."""
        found = []
        if self.held:
            found.append(
                Target("held, of the distinct tokens' bytes", self.held[OURS][-1] / self.distinct, HELD_TARGET)
            )
        if self.samples:
            slope = _slopes(self.samples[OURS])[0]
            found.append(
                Target("resident: growth over the second half", 100 * slope.share, 100 * RISE_TARGET, unit=" %")
            )
        return found

    @property
    def note(self) -> str:
        """The meaning of the columns."""
        return _NOTE

    @property
    def tables(self) -> Sequence[Table]:
        """Three of them."""
        shape = self.shape
        title = (
            f"{shape.conversations} conversations in turns, {shape.turns} requests each, on a prefix of {shape.prefix} "
            f"tokens: {self.distinct / _MB:.1f} MB are distinct"
        )
        held = [
            (name, f"{after[-1] / _MB:.1f}", f"{after[-1] / self.distinct:.2f}") for name, after in self.held.items()
        ]
        processes = [
            (name, *(_of(grown, self.distinct) for grown in (growth.told, growth.resident)))
            for name, growth in self.processes.items()
        ]
        return [
            Table(f"held: {title}", ("", "MB", "x"), held),
            Table("processes: the same, over HTTP", ("", "told: MB  x", "resident: MB  x"), processes),
            Table(f"growth: prompts that share nothing, {self.budget} for ours", _COLUMNS, self._growth()),
        ]

    def _growth(self) -> Sequence[Sequence[str]]:
        rows = []
        for name, samples in self.samples.items():
            resident, told = _slopes(samples)
            half = (samples[-1].prompts - samples[len(samples) // 2].prompts) or 1
            rows.append(
                (
                    name,
                    str(samples[-1].prompts),
                    f"{resident.begin / _MB:.1f}",
                    f"{100 * resident.share:.2f}",
                    f"{resident.rise / half / 1e3:.2f}",
                    f"{told.begin / _MB:.1f}" if told else "-",
                    f"{100 * told.share:.2f}" if told else "-",
                )
            )
        return rows

    def data(self) -> Mapping[str, object]:
        """For JSON: bytes after each request, and of each sample."""
        return {
            "shape": self.shape._asdict(),
            "token_bytes": self.token_bytes,
            "distinct_bytes": self.distinct,
            "budget": self.budget,
            "held_bytes": {name: [*after] for name, after in self.held.items()},
            "processes": {
                name: {"before": growth.before._asdict(), "after": growth.after._asdict()}
                for name, growth in self.processes.items()
            },
            "samples": {name: [one._asdict() for one in samples] for name, samples in self.samples.items()},
        }

    @property
    def charts(self) -> Sequence[Chart]:
        """Bytes held against those of distinct tokens, and the processes over many prompts."""
        held = {name: [(at, one / _MB) for at, one in enumerate(after, 1)] for name, after in self.held.items()}
        count = self.shape.conversations * self.shape.turns if self.held else 0
        held["distinct tokens"] = [(at, self.token_bytes * self.shape.distinct(at) / _MB) for at in range(1, count + 1)]
        resident = {name: [(one.prompts, one.rss / _MB) for one in samples] for name, samples in self.samples.items()}
        charts = [Lines("held after each request, MB", held, "requests")] if self.held else []
        return [*charts, *([Lines("resident after so many prompts, MB", resident, "prompts")] if resident else [])]


_COLUMNS = ("", "prompts", "resident MB", "growth %", "KB a prompt", "told MB", "growth %")


def _slopes(samples: Sequence[Sample]) -> tuple[Slope, Slope | None]:
    at = [one.prompts for one in samples]
    told = [one.told for one in samples if one.told is not None]
    return Slope.of(at, [one.rss for one in samples]), Slope.of(at, told) if len(told) == len(at) else None


def _of(grown: int | None, distinct: int) -> str:
    return "-" if grown is None else f"{grown / _MB:.1f}  {grown / distinct:.2f}"
