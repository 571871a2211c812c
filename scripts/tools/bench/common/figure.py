"""Pictures of benchmarks: bars in groups, and lines. matplotlib is imported only to draw."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
        """Draws the bars; each bears its figure unless they are stacked."""
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
        """Draws the lines over an axis that begins at 0."""
        for index, (name, points) in enumerate(self.points.items()):
            axes.plot(*zip(*points, strict=True), color=COLOURS[index % len(COLOURS)], label=name)
        axes.set_xlabel(self.x)
        axes.set_ylim(bottom=0)


Chart = Bars | Lines


def draw(charts: Sequence[Chart], path: Path) -> None:
    """Draws the charts into a PNG, at most three side by side."""
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
