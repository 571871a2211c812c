"""What benchmarks share: rounds of contenders, targets that are met or missed, tables for people, charts."""

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#9aa0a6", "#e8a33d", "#2b6cb0", "#7b4fa3", "#3c8d5a", "#c0504d", "#5b9bd5", "#70ad47", "#ffc000")
_WIDTH = 0.84  # of a group of bars


class Bars(NamedTuple):
    """Bars side by side: for each name a height in each group, None for a gap; `stacked` puts them on each other.

    A dashed line marks `target`. Names keep their colours in all charts of a picture that list the same names.
    """

    title: str
    groups: Sequence[str]
    heights: Mapping[str, Sequence[float | None]]
    digits: int = 0
    log: bool = False
    target: float | None = None
    stacked: bool = False

    def draw(self, axes: "Axes") -> None:
        bottoms = [0.0] * len(self.groups)
        for index, (name, heights) in enumerate(self.heights.items()):
            found = [(place, height) for place, height in enumerate(heights) if height is not None]
            if not found:
                continue
            offset = 0.0 if self.stacked else _WIDTH / len(self.heights) * (index - (len(self.heights) - 1) / 2)
            bars = axes.bar(
                [place + offset for place, _ in found],
                [height for _, height in found],
                width=_WIDTH if self.stacked else _WIDTH / len(self.heights),
                bottom=[bottoms[place] for place, _ in found] if self.stacked else 0.0,
                color=COLOURS[index % len(COLOURS)],
                label=name,
            )
            for place, height in found:
                bottoms[place] += height
            if not self.stacked:
                axes.bar_label(bars, fmt=f"%.{self.digits}f", fontsize=7)
        axes.set_xticks(range(len(self.groups)), list(self.groups))
        if self.log:
            axes.set_yscale("log")
        if self.target is not None:
            axes.axhline(self.target, color="black", linestyle="dashed", lw=1)


class Lines(NamedTuple):
    """A line for each name, through points (x, y)."""

    title: str
    points: Mapping[str, Sequence[tuple[float, float]]]
    x: str = ""

    def draw(self, axes: "Axes") -> None:
        for index, (name, points) in enumerate(self.points.items()):
            axes.plot(*zip(*points, strict=True), color=COLOURS[index % len(COLOURS)], label=name)
        axes.set_xlabel(self.x)
        axes.set_ylim(bottom=0)


Chart = Bars | Lines


def draw(charts: Sequence[Chart], path: Path) -> None:
    from matplotlib.figure import Figure

    columns = max(1, 2 if len(charts) == 4 else min(3, len(charts)))
    rows = max(1, ceil(len(charts) / columns))
    figure = Figure(figsize=(5.5 * columns, 4.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes in grid[len(charts) :]:
        axes.set_visible(False)
    for axes, chart in zip(grid, charts, strict=False):
        chart.draw(axes)
        axes.set_title(chart.title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


Figure = TypeVar("Figure")
Name = TypeVar("Name", bound=Hashable)


def interleave(
    contenders: Mapping[Name, Callable[[], Figure]], rounds: int, *, warm: int = 1
) -> dict[Name, list[Figure]]:
    """Measures each contender once a round; the first one changes from round to round. `warm` rounds are discarded.

    Returns the figures of each contender, round by round: those with the same index were found one right after the
    other, so ratios of contenders are taken round by round.
    """
    names = list(contenders)
    found: dict[Name, list[Figure]] = {name: [] for name in names}
    for number in range(-warm, rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            figure = contenders[name]()
            if number >= 0:
                found[name].append(figure)
    return found


Number = TypeVar("Number", int, float)

WIDTH = 132
_FIGURES = "0123456789-"  # first characters of cells that are aligned on the right


class Target(NamedTuple):
    """A figure and its bound: an upper bound if `most`, else a lower one."""

    what: str
    value: float
    bound: float
    most: bool = True
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.most else self.value >= self.bound

    def data(self) -> Mapping[str, object]:
        return {**self._asdict(), "met": self.met}


class Table(NamedTuple):
    """Rows of text under a title; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> Iterator[str]:
        """Yields the title, the names of the columns, and the rows, at most `WIDTH` characters each."""
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        gap = max(1, min(3, (WIDTH - sum(widths)) // max(1, len(widths) - 1)))
        table = RichTable(
            box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False, header_style=""
        )
        for index, name in enumerate(self.columns):
            cells = [row[index] for row in self.rows]
            right = index > 0 and all(not cell or cell[0] in _FIGURES for cell in cells)
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        text = StringIO()
        Console(file=text, width=WIDTH, color_system=None, markup=False, highlight=False).print(table)
        yield self.title
        yield from (line.rstrip() for line in text.getvalue().splitlines())


@dataclass(frozen=True)
class Report:
    """The results of a benchmark: targets as far as they were measured, tables, charts, and all figures for JSON."""

    targets: Sequence[Target]
    tables: Sequence[Table]
    charts: Sequence[Chart]
    figures: Mapping[str, object]
    note: str = ""
    """The text below the tables: the meaning of their words."""

    def table(self) -> str:
        """Returns all tables as text; those without rows are left out."""
        return text_of(self.tables, note=self.note)

    def plot(self, path: Path) -> None:
        draw(self.charts, path)


class Rounds(NamedTuple):
    """Figures by contender: of each round one number for each case."""

    found: Mapping[str, Sequence[Mapping[str, float]]]

    def of(self, name: str, case: str) -> list[float]:
        return [figures[case] for figures in self.found[name]]

    def median(self, name: str, case: str) -> float:
        return median(self.of(name, case))

    def ratio(self, name: str, other: str, case: str) -> float:
        """Returns the median of the ratios round by round."""
        return median_ratio(self.of(name, case), self.of(other, case))

    def rows(self, cases: Sequence[str], form: str = ",.1f") -> dict[str, list[str]]:
        """Returns the medians as cells, by contender."""
        return {name: [format(self.median(name, case), form) for case in cases] for name in self.found}

    def bars(self, title: str, cases: Sequence[str], digits: int = 0) -> Bars:
        return Bars(title, cases, {name: [self.median(name, case) for case in cases] for name in self.found}, digits)


def targets_table(targets: Sequence[Target]) -> Table:
    rows = [
        (
            target.what,
            _figure(target.value) + target.unit,
            ("at most " if target.most else "at least ") + _figure(target.bound) + target.unit,
            "met" if target.met else "MISSED",
        )
        for target in targets
    ]
    return Table("targets", ("", "found", "target", ""), rows)


def text_of(tables: Sequence[Table], head: str = "", note: str = "") -> str:
    """Returns the tables that have rows, one below the other, between `head` and `note`."""
    return "\n\n".join(filter(None, [head, *("\n".join(table.lines()) for table in tables if table.rows), note]))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percentile(values: Sequence[Number], percent: float) -> Number:
    """Returns the smallest value that at least `percent` of the values do not exceed (nearest rank); 0 without any."""
    ranked = sorted(values)
    return ranked[max(0, ceil(len(ranked) * percent / 100) - 1)] if ranked else 0


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Returns the median of the ratios round by round, since noise hits both contenders of a round alike."""
    return median(one / other for one, other in zip(values, others, strict=True))


def write_json(to: str, data: Mapping[str, object]) -> None:
    """Writes into the file `to`, or to standard output if it is "-"."""
    text = json.dumps(data, indent=1)
    if to == "-":
        print(text)
    else:
        Path(to).write_text(text + "\n")
