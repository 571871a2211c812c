"""The picture of `scripts/bench decode`."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib import pyplot
from matplotlib.axes import Axes

from scripts.tools.bench.common.contenders import BARE
from scripts.tools.bench.common.figure import COLOURS, Bars, draw_bars, tidy
from scripts.tools.bench.decode import Decoded
from scripts.tools.bench.decode_profile import PARTS


def draw(models: Sequence[Decoded], path: Path) -> None:
    """Speeds over that of the bare loop, and where a token's time goes."""
    figure, (speeds, profiles) = pyplot.subplots(1, 2, figsize=(13, 4.5))
    names = list(dict.fromkeys(name for model in models for name in model.speeds))
    bars = [Bars(name, [model.ratio(name, BARE) for model in models]) for name in names]
    groups = [f"{model.size}\nbare loop {median(model.speeds[BARE]):.0f} tok/s" for model in models]
    draw_bars(speeds, groups, bars, room=0.2, digits=2)
    speeds.set_title("decode, one stream, over the bare loop")
    speeds.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(names))
    _draw_profiles(profiles, models)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_profiles(axes: Axes, models: Sequence[Decoded]) -> None:
    bottoms = [0.0] * len(models)
    colours = [*COLOURS, "#c0504d", "#5b9bd5", "#70ad47", "#ffc000"]
    for part, colour in zip(PARTS, colours, strict=True):
        shares = [100 * model.profile.parts_us[part] / model.profile.step_us for model in models]
        axes.bar(range(len(models)), shares, 0.6, bottom=bottoms, color=colour, label=part)
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    steps = [model.profile.step_us / 1e3 for model in models]
    labels = [f"{model.size}\n{step:.2f} ms" for model, step in zip(models, steps, strict=True)]
    axes.set_xticks(range(len(models)), labels)
    axes.set_title("where a token's time goes, %")
    axes.legend(fontsize=8, bbox_to_anchor=(1.0, 1.0), loc="upper left")
    tidy(axes)
