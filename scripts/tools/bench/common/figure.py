"""Bars side by side in groups, as the benchmarks draw them."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

COLOURS = ("#9aa0a6", "#e8a33d", "#2b6cb0", "#7b4fa3", "#3c8d5a")


class Bars(NamedTuple):
    """The bars of one name, a height in each group; None leaves a gap."""

    name: str
    heights: Sequence[float | None]


def draw_bars(axes: Axes, groups: Sequence[str], series: Sequence[Bars], *, room: float, digits: int = 0) -> None:
    """One group of bars per name in `groups`. Each bar bears its figure, inside where it is higher than `room`."""
    places = bar_places(len(series))
    for index, bars in enumerate(series):
        shown = [(place + places[index], height) for place, height in enumerate(bars.heights) if height is not None]
        colour = COLOURS[index % len(COLOURS)]
        middles, heights = [place for place, _ in shown], [height for _, height in shown]
        axes.bar(middles, heights, width=0.84 / len(series), color=colour, label=bars.name)
        for place, height in shown:
            up, alignment, ink = (-3, "top", "white") if height >= room else (2, "bottom", "black")
            axes.annotate(
                f"{height:.{digits}f}",
                (place, height),
                xytext=(0, up),
                textcoords="offset points",
                va=alignment,
                ha="center",
                color=ink,
                fontsize=7,
            )
    axes.set_xticks(range(len(groups)), groups)
    tidy(axes)


def bar_places(count: int) -> list[float]:
    """Where the middles of `count` bars of one group stand, around 0."""
    return [0.84 / count * (index - (count - 1) / 2) for index in range(count)]


def tidy(axes: Axes) -> None:
    """No frame, and lines to read heights by."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
