"""The picture of `scripts/bench cache`: how much was reused, how long the first token took, how the work adds up."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scripts.tools.bench.cache.rows import BEST, ModelReport, Row, cumulative
from scripts.tools.bench.common.figure import COLOURS, Bars, bar_places, draw_bars, tidy

_ROOM = 4  # a bar of this height, in either chart, has room for its figure


def draw(models: Sequence[ModelReport], path: Path) -> None:
    """Writes a PNG: two charts with bars for every model and cache, below them one chart with curves for each model."""
    columns = min(4, max(2, len(models)))
    lines = -(-len(models) // columns)
    figure = Figure(figsize=(14, 4.2 + 2.9 * lines), layout="constrained")
    halves = figure.add_gridspec(2, 1, height_ratios=[4.0, 2.9 * lines])
    above, below = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])
    hits, first = above.subplots(1, 2)
    _draw_hits(hits, models)
    _draw_first_tokens(first, models)
    above.legend(*hits.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    below.suptitle("Prompt tokens computed so far, thousands, over the requests")
    grid = below.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(models) :]:
        axes.set_visible(False)
    for axes, model in zip(grid.flat, models, strict=False):
        _draw_work(axes, model)
    figure.savefig(path, dpi=110)


def _draw_hits(axes: Axes, models: Sequence[ModelReport]) -> None:
    axes.set_title("Prompt tokens from the cache, %")
    axes.set_ylim(0, 100)
    _draw_bars(axes, models, lambda row: 100 * row.losses.hit_rate)
    for place, model in enumerate(models):
        best = next(100 * row.losses.hit_rate for row in model.rows if row.name == BEST)
        label = "_" * place + BEST  # the legend passes over labels that begin with _
        axes.hlines(best, place - 0.45, place + 0.45, colors="black", linestyles="dashed", lw=1, label=label)


def _draw_first_tokens(axes: Axes, models: Sequence[ModelReport]) -> None:
    axes.set_title("Time to first token, ms: median (bars), up to the 95th percentile (lines)")
    axes.set_yscale("log")
    _draw_bars(axes, models, lambda row: row.costs.ttft_ms_median if row.costs else 0.0)
    for place, model in enumerate(models):
        for middle, row in zip(bar_places(len(model.contenders)), model.contenders, strict=True):
            if row.costs is not None:
                axes.vlines(place + middle, row.costs.ttft_ms_median, row.costs.ttft_ms_p95, colors="black", lw=1)
    axes.set_ylim(bottom=1)


def _draw_work(axes: Axes, model: ModelReport) -> None:
    for colour, row in zip(COLOURS, model.contenders, strict=False):
        axes.plot([tokens / 1e3 for tokens in cumulative(row)], color=colour, label=row.name, lw=2)
    axes.set_title(model.kind, fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes)


def _draw_bars(axes: Axes, models: Sequence[ModelReport], value: Callable[[Row], float]) -> None:
    """One group of bars per model."""
    series = [
        Bars(row.name, [value(model.contenders[index]) for model in models])
        for index, row in enumerate(models[0].contenders)
    ]
    draw_bars(axes, [model.kind for model in models], series, room=_ROOM)
