"""The picture of `scripts/bench ttft`."""

from pathlib import Path

from matplotlib import pyplot

from scripts.tools.bench.common.figure import Bars, draw_bars
from scripts.tools.bench.ttft import CASES, TtftReport


def draw(report: TtftReport, path: Path) -> None:
    """The cold prompt beside those that have something cached, which take a tenth of it or less."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.5), width_ratios=(1, 3))
    for axes, cases in ((left, CASES[:1]), (right, CASES[1:])):
        bars = [Bars(name, [report.ms(name, case) for case in cases]) for name in report.found]
        top = max(height for one in bars for height in one.heights if height is not None)
        draw_bars(axes, list(cases), bars, room=top / 8, digits=1)
        axes.set_ylabel("ms")
    left.set_title("cold, 2,000 tokens")
    right.set_title(f"with a known prefix; {report.size} parameters")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
