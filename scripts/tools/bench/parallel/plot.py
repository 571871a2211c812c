"""The picture of `scripts/bench parallel`: throughput, gaps, waits and sharing, with their targets."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.tools.bench.common.figure import COLOURS, Bars, draw_bars, tidy
from scripts.tools.bench.parallel.report import DROP_TARGET_S, GAP_TARGET, SHARED_TARGET, Row, Shape


def draw(shape: Shape, rows: Sequence[Row], path: Path) -> None:
    """Writes a PNG with four charts; a contender has the same colour in all of them."""
    figure = Figure(figsize=(14, 9), layout="constrained")
    (speeds, gaps), (drops, shares) = figure.subplots(2, 2)
    _draw_speeds(speeds, rows)
    gaps.set_title("Largest gap of a running stream while a prompt comes, worst turn, ms")
    _draw_lengths(
        gaps,
        shape.prompts,
        rows,
        lambda row, length: max(one.largest_s for one in row.gap[length]) if length in row.gap else None,
        GAP_TARGET * shape.max_gap_ms / 1e3,
    )
    drops.set_title("First token of a short prompt after another client left in its prefill, ms")
    _draw_lengths(
        drops,
        shape.prompts,
        rows,
        lambda row, length: median(one.after_s for one in row.drop[length]) if length in row.drop else None,
        DROP_TARGET_S,
    )
    shares.set_title("Last first token of prompts with one prefix, over the bound")
    ratios = [(row, median(one.ratio for one in row.shared)) for row in rows if row.shared]
    for place, (_, ratio) in enumerate(ratios):
        bar = shares.bar([place], [ratio], 0.6, color=COLOURS[place % len(COLOURS)])
        shares.bar_label(bar, fmt="%.2f", fontsize=7)
    shares.set_xticks(range(len(ratios)), [row.name for row, _ in ratios])
    shares.axhline(SHARED_TARGET, color="black", linestyle="dashed", lw=1)
    tidy(shares)
    figure.legend(*speeds.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=110)


def _draw_speeds(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_title("Tokens/s of all decoding streams")
    for index, row in enumerate(rows):
        places = sorted(row.decode)
        heights = [median(rate.tokens_per_s for rate in row.decode[number]) for number in places]
        axes.plot(places, heights, marker="o", color=COLOURS[index % len(COLOURS)], label=row.name)
    axes.set_xlabel("streams")
    axes.set_ylim(bottom=0)
    tidy(axes)


def _draw_lengths(
    axes: Axes,
    lengths: Sequence[int],
    rows: Sequence[Row],
    seconds: Callable[[Row, int], float | None],
    target_s: float,
) -> None:
    """In ms, on a scale that shows 20 ms beside 10 s. Who only decodes comes last, so the others keep their colours."""
    series = []
    for row in rows:
        heights = [seconds(row, length) for length in lengths]
        if any(height is not None for height in heights):
            series.append(Bars(row.name, [None if height is None else 1e3 * height for height in heights]))
    if series:
        axes.set_yscale("log")
        axes.axhline(1e3 * target_s, color="black", linestyle="dashed", lw=1)
        axes.set_ylim(bottom=1)
        draw_bars(axes, [f"prompt of {length} tokens" for length in lengths], series, room=float("inf"))
