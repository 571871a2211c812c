"""The report of a benchmark: targets that are met or missed, tables for people, figures for JSON, charts."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from math import ceil
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from scripts.tools.bench.common.figure import Chart, draw

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
        """True if the figure keeps its bound."""
        return self.value <= self.bound if self.most else self.value >= self.bound

    def data(self) -> Mapping[str, object]:
        """Returns the target as it stands in JSON."""
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


class Report(ABC):
    """The results of a benchmark. Subclasses hold the raw figures."""

    @property
    @abstractmethod
    def targets(self) -> Sequence[Target]:
        """The targets, as far as they were measured."""

    @property
    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """The tables; those without rows are left out."""

    @property
    def head(self) -> str:
        """The text above the tables."""
        return ""

    @property
    def note(self) -> str:
        """The text below the tables: the meaning of their words."""
        return ""

    @property
    @abstractmethod
    def charts(self) -> Sequence[Chart]:
        """The charts of the picture."""

    @abstractmethod
    def data(self) -> Mapping[str, object]:
        """Returns the figures for JSON."""

    def table(self) -> str:
        """Returns all tables as text."""
        return text_of(self.tables, self.head, self.note)

    def plot(self, path: Path) -> None:
        """Draws the charts into a PNG."""
        draw(self.charts, path)


def targets_table(targets: Sequence[Target]) -> Table:
    """Returns a table of the targets and their verdicts."""
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
