"""What benchmarks have in common when they tell what they found: tables, and targets that are met or not."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple, TypeVar

Number = TypeVar("Number", int, float)

_FIGURES = "0123456789-"  # what those begin with; they stand on the right


class Target(NamedTuple):
    """A figure, and the bound that it is to keep. `most`: it is to be at most the bound, else at least."""

    what: str
    value: float
    bound: float
    most: bool = True
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether it keeps its bound."""
        return self.value <= self.bound if self.most else self.value >= self.bound

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {**self._asdict(), "met": self.met}


class Table(NamedTuple):
    """Rows of text under a title; the first column is the name of the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> Iterator[str]:
        """At most 132 characters each, where the cells are reasonable."""
        columns = list(zip(self.columns, *self.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        figures = [False, *(all(not cell or cell[0] in _FIGURES for cell in column[1:]) for column in columns[1:])]
        yield self.title
        for row in (self.columns, *self.rows):
            cells = zip(row, widths, figures, strict=True)
            yield "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()


def targets_table(targets: Sequence[Target]) -> Table:
    """Which of them are met."""
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


def text_of(tables: Sequence[Table], note: str = "") -> str:
    """The tables one below the other, and what their words mean."""
    parts = ["\n".join(table.lines()) for table in tables if table.rows]
    return "\n\n".join([*parts, note] if note else parts)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percentile(values: Sequence[Number], percent: float) -> Number:
    """The smallest value that at least `percent` of them do not exceed (nearest rank); 0 where there are none."""
    ranked = sorted(values)
    return ranked[max(0, ceil(len(ranked) * percent / 100) - 1)] if ranked else 0


def write_json(to: str, data: Mapping[str, object]) -> None:
    """Writes into the file `to`, or to standard output if it is "-"."""
    text = json.dumps(data, indent=1)
    if to == "-":
        print(text)
    else:
        Path(to).write_text(text + "\n")
