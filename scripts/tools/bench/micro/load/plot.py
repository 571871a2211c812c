"""The picture of `scripts/bench load`: how fast, and with how much memory."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.tools.bench.common.figure import Bars, draw_bars
from scripts.tools.bench.micro.load.report import FormReport, Row
from scripts.tools.bench.micro.load.turn import LOADERS, PLAIN

TARGET_PERCENT = 80


def draw(forms: Sequence[FormReport], path: Path) -> None:
    """Writes a PNG: three charts with bars for every form and loader."""
    figure = Figure(figsize=(14, 10), layout="constrained")
    speeds, shares, peaks = figure.subplots(3, 1)
    speeds.set_title("Weights loaded, GB/s")
    _draw(speeds, forms, lambda form, row: form.speed(row), digits=2)
    shares.set_title(f"Speed, % of {PLAIN}")
    shares.axhline(TARGET_PERCENT, color="black", linestyle="dashed", lw=1)
    _draw(shares, forms, lambda form, row: row.percent_of(form.rows[0]))
    peaks.set_title("Peak of MLX's memory, % of the weights")
    _draw(peaks, forms, lambda form, row: 100 * row.peak_bytes / form.weight_bytes)
    figure.legend(*speeds.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=110)


def _draw(axes: Axes, forms: Sequence[FormReport], value: Callable[[FormReport, Row], float], digits: int = 0) -> None:
    loaders = [loader for loader in LOADERS if any(loader in form.loaders for form in forms)]
    series = [
        Bars(loader, [value(form, form.loaders[loader]) if loader in form.loaders else None for form in forms])
        for loader in loaders
    ]
    highest = max(height for bars in series for height in bars.heights if height is not None)
    draw_bars(axes, [form.form for form in forms], series, room=highest / 10, digits=digits)
