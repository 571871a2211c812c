"""The common parts of benchmarks: rounds of contenders, targets that are met or missed, tables for people."""

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

Figure = TypeVar("Figure")
Name = TypeVar("Name", bound=Hashable)


def interleave(contenders: Mapping[Name, Callable[[], Figure]], rounds: int) -> dict[Name, list[Figure]]:
    """Measures each contender once a round; the first one changes from round to round. One round before does not count.

    Returns the figures of each contender, round by round: those with the same index were found one right after the
    other, so ratios of contenders are taken round by round.
    """
    names = list(contenders)
    found: dict[Name, list[Figure]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            figure = contenders[name]()
            if number >= 0:
                found[name].append(figure)
    return found


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


class Table(NamedTuple):
    """Rows of text under a title; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> Iterator[str]:
        """Yields the title, the names of the columns, and the rows. Columns of numbers are aligned on the right."""
        yield self.title
        columns = [[*column] for column in zip(self.columns, *self.rows, strict=True)]
        for number, column in enumerate(columns):
            width = max(map(len, column))
            is_numbers = number > 0 and all(not cell or cell[0] in _FIGURES for cell in column[1:])
            columns[number] = [cell.rjust(width) if is_numbers else cell.ljust(width) for cell in column]
        yield from ("   ".join(row).rstrip() for row in zip(*columns, strict=True))


@dataclass(frozen=True)
class Report:
    """The results of a benchmark: the measured targets, tables, and all figures for JSON."""

    targets: Sequence[Target]
    tables: Sequence[Table]
    figures: Mapping[str, object]
    note: str = ""
    """The text below the tables: the meaning of their words."""


class Rounds(NamedTuple):
    """Figures by contender: of each round one number for each case."""

    found: Mapping[str, Sequence[Mapping[str, float]]]

    def of(self, name: str, case: str) -> list[float]:
        return [figures[case] for figures in self.found[name]]

    def median(self, name: str, case: str) -> float:
        return median(self.of(name, case))

    def ratio(self, name: str, other: str, case: str) -> float:
        return median_ratio(self.of(name, case), self.of(other, case))

    def rows(self, cases: Sequence[str], form: str = ",.1f") -> dict[str, list[str]]:
        """Returns the medians as cells, by contender."""
        return {name: [format(self.median(name, case), form) for case in cases] for name in self.found}


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


def text_of(tables: Sequence[Table], note: str) -> str:
    """Returns the tables that have rows, one below the other, and `note` after them."""
    return "\n\n".join(filter(None, [*("\n".join(table.lines()) for table in tables if table.rows), note]))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


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
