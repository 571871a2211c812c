"""The report of `scripts/bench load`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.report import Report, Table, Target, median_ratio
from scripts.tools.bench.micro.load.turn import LOADERS, PLAIN, RUNNER, Turn

_SPEED, _PEAK = 80.0, 110.0  # percent
_COLUMNS = ("", "GB/s", "% of mx.load", "seconds", "least", "most", "open ms", "peak %", "resident %")
_NOTE = """GB/s        bytes of the weights over the median time; % of mx.load: the median of each turn's ratio
seconds     median, least and most of all turns, open ms included: what the runner takes to find and check the headers
peak        of MLX's memory, and what the process had resident at most beyond its start: over the bytes of the weights
mx.load     every file, and evaluation of all arrays in it: what the others are held against"""


class Row(NamedTuple):
    """One loader on one form, turn by turn."""

    loader: str
    turns: Sequence[Turn]

    @property
    def seconds(self) -> float:
        """The median."""
        return median(turn.seconds for turn in self.turns)

    @property
    def open_seconds(self) -> float | None:
        """The median; None where a loader tells no such time."""
        times = [turn.open_seconds for turn in self.turns if turn.open_seconds is not None]
        return median(times) if times else None

    @property
    def peak_bytes(self) -> int:
        """The highest."""
        return max(turn.peak_bytes for turn in self.turns)

    @property
    def resident_bytes(self) -> int:
        """The highest."""
        return max(turn.resident_bytes for turn in self.turns)

    def percent_of(self, other: "Row") -> float:
        """Returns the speed in percent of that of `other`: the median over the rounds, since noise hits both alike."""
        return 100 * median_ratio(*([turn.seconds for turn in row.turns] for row in (other, self)))


class FormReport(NamedTuple):
    """One form of weights; the first row is the yardstick."""

    form: str
    meaning: str
    tensors: int
    files: int
    weight_bytes: int
    rows: Sequence[Row]

    @property
    def loaders(self) -> Mapping[str, Row]:
        """The rows by their loaders."""
        return {row.loader: row for row in self.rows}

    def speed(self, row: Row) -> float:
        """In GB/s."""
        return self.weight_bytes / row.seconds / 1e9

    @property
    def table(self) -> Table:
        """The rows under one headline."""
        headline = (
            f"{self.form}: {self.meaning}; {self.tensors:,} arrays in {self.files:,} files, "
            f"{self.weight_bytes / 1e6:,.1f} MB"
        )
        return Table(headline, _COLUMNS, [*map(self._cells, self.rows)])

    def data(self) -> dict[str, object]:
        """For JSON."""
        return {
            "form": self.form,
            "tensors": self.tensors,
            "files": self.files,
            "weight_bytes": self.weight_bytes,
            "loaders": {loader: self._data(row) for loader, row in self.loaders.items()},
        }

    def _data(self, row: Row) -> dict[str, object]:
        return {
            "gb_per_s": self.speed(row),
            "percent": row.percent_of(self.rows[0]),
            "peak_ratio": row.peak_bytes / self.weight_bytes,
            "resident_ratio": row.resident_bytes / self.weight_bytes,
            "turns": {name: [getattr(turn, name) for turn in row.turns] for name in Turn._fields},
        }

    def _cells(self, row: Row) -> Sequence[str]:
        times = [turn.seconds for turn in row.turns]
        return (
            row.loader,
            f"{self.speed(row):.2f}",
            f"{row.percent_of(self.rows[0]):.0f}",
            *(f"{seconds:.3f}" for seconds in (row.seconds, min(times), max(times))),
            "" if row.open_seconds is None else f"{1e3 * row.open_seconds:.1f}",
            f"{100 * row.peak_bytes / self.weight_bytes:.1f}",
            f"{100 * row.resident_bytes / self.weight_bytes:.1f}",
        )


@dataclass(frozen=True)
class LoadReport(Report):
    """All of it."""

    seed: int
    turns: int
    cold: bool
    forms: Sequence[FormReport]

    @property
    def head(self) -> str:
        """The circumstances."""
        cache = "dropped from the page cache before every turn" if self.cold else "in the page cache"
        return f"{self.turns} turns of each loader, every one in a fresh process, files {cache}; seed {self.seed}"

    @property
    def tables(self) -> Sequence[Table]:
        """One for each form."""
        return [form.table for form in self.forms]

    @property
    def note(self) -> str:
        """The meaning of the columns."""
        return _NOTE

    @property
    def targets(self) -> list[Target]:
        """Of this runner, form by form."""
        found = []
        for form in self.forms:
            if ours := form.loaders.get(RUNNER):
                percent = ours.percent_of(form.rows[0])
                peak = 100 * ours.peak_bytes / form.weight_bytes
                found.append(Target(f"{form.form}: speed over MLX's own", percent, _SPEED, most=False, unit=" %"))
                found.append(Target(f"{form.form}: peak memory over weights", peak, _PEAK, unit=" %"))
        return found

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {
            "seed": self.seed,
            "turns": self.turns,
            "cold": self.cold,
            "yardstick": PLAIN,
            "forms": [form.data() for form in self.forms],
        }

    @property
    def charts(self) -> Sequence[Chart]:
        """Speeds, shares of `mx.load`, and peaks of memory, of every form and loader."""
        forms = [form.form for form in self.forms]

        def of(value: Callable[[FormReport, Row], float]) -> dict[str, list[float | None]]:
            names = [name for name in LOADERS if any(name in form.loaders for form in self.forms)]
            return {
                name: [value(form, row) if (row := form.loaders.get(name)) else None for form in self.forms]
                for name in names
            }

        shares = of(lambda form, row: row.percent_of(form.rows[0]))
        return [
            Bars("weights loaded, GB/s", forms, of(FormReport.speed), digits=2),
            Bars(f"speed, % of {PLAIN}", forms, shares, target=_SPEED),
            Bars(
                "peak of MLX's memory, % of the weights",
                forms,
                of(lambda form, row: 100 * row.peak_bytes / form.weight_bytes),
            ),
        ]
