"""What `scripts/bench load` found: as a table, as JSON and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from scripts.tools.bench.common.report import Target
from scripts.tools.bench.micro.load.turn import PLAIN, RUNNER, Turn

_SPEED, _PEAK = 80.0, 110.0  # percent
_HEAD = (
    f"{'':<10}{'GB/s':>8}{'% of mx.load':>14}{'seconds':>9}{'least':>8}{'most':>8}{'open ms':>9}"
    f"{'peak %':>9}{'resident %':>12}"
)
_LEGEND = """
GB/s        bytes of the weights over the median time; % of mx.load: the median of each turn's ratio to its neighbour
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
        """How fast it was against `other`: the median over the turns, since what disturbs a turn disturbs both."""
        return 100 * median(theirs.seconds / ours.seconds for ours, theirs in zip(self.turns, other.turns, strict=True))


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

    def table(self) -> str:
        """The rows under one headline."""
        headline = (
            f"{self.form}: {self.meaning}; {self.tensors:,} arrays in {self.files:,} files, "
            f"{self.weight_bytes / 1e6:,.1f} MB"
        )
        return "\n".join([headline, _HEAD, *map(self._line, self.rows)])

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

    def _line(self, row: Row) -> str:
        times = [turn.seconds for turn in row.turns]
        opening = "" if row.open_seconds is None else f"{1e3 * row.open_seconds:.1f}"
        return (
            f"{row.loader:<10}{self.speed(row):>8.2f}{row.percent_of(self.rows[0]):>14.0f}{row.seconds:>9.3f}"
            f"{min(times):>8.3f}{max(times):>8.3f}{opening:>9}{100 * row.peak_bytes / self.weight_bytes:>9.1f}"
            f"{100 * row.resident_bytes / self.weight_bytes:>12.1f}"
        )


class LoadReport(NamedTuple):
    """All of it."""

    seed: int
    turns: int
    cold: bool
    forms: Sequence[FormReport]

    def table(self) -> str:
        """One table per form, and what the columns mean."""
        cache = "dropped from the page cache before every turn" if self.cold else "in the page cache"
        head = f"{self.turns} turns of each loader, every one in a fresh process, files {cache}; seed {self.seed}"
        return "\n\n".join([head, *(form.table() for form in self.forms)]) + "\n" + _LEGEND

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

    def plot(self, path: Path) -> None:
        """Draws the picture."""
        from scripts.tools.bench.micro.load.plot import draw  # matplotlib is there for those who draw

        draw(self.forms, path)
