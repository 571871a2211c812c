"""`scripts/bench wire`: what it costs to bring lines from the thread that computes to the clients, without a model.

Each server is a process of its own with a thread in the place of the engine, which tells every stream one word a step;
the client reads as fast as it goes. `ours` is the runner's own app behind its outbox, `mlx_lm.server` its handlers
behind their queues, `floor` two threads in Python that wake each other and send the same bytes, with nothing else.

paced   every stream gets a line every 10 ms: CPU of the server for each line, in microseconds. `handed` is what the
        thread that computes spends to hand lines over, `written` what all others spend to write them
flood   as fast as it goes: lines per second

With few streams nearly all of the paced cost is the system's: a thread is woken, a socket written, and the processor
has gone to sleep between two steps. That is what the floor shows.
"""

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from scripts.tools.bench.common.interleave import take_turns
from scripts.tools.bench.common.report import Table, Target, text_of
from scripts.tools.bench.micro.wire.client import Flow, Server, measure
from scripts.tools.bench.micro.wire.load import Load

OURS, FLOOR, MLX_LM = "ours", "floor", "mlx_lm.server"
LINES_PER_S = 200_000
USED_US = 15
_PACE_S = 0.01
_PACKAGE = "scripts.tools.bench.micro.wire"
SERVERS = {
    FLOOR: Server(f"{_PACKAGE}.floor", "/", ""),
    OURS: Server(f"{_PACKAGE}.ours", "/completion", '{"Prompt":"xy"}'),
    MLX_LM: Server(f"{_PACKAGE}.mlx_lm_server", "/v1/completions", '{"prompt":"xy","stream":true}'),
}
_FLOOD_SHARE = {OURS: 1, MLX_LM: 10}
"""How many times fewer lines it is flooded with; who is not here has nothing to tell of a flood."""


class WireReport(NamedTuple):
    """Flows by the number of streams and by server, turn by turn."""

    turns: int
    paced: Mapping[int, Mapping[str, Sequence[Flow]]]
    flood: Mapping[int, Mapping[str, Sequence[Flow]]]

    @property
    def targets(self) -> Sequence[Target]:
        """Of ours."""
        return [
            *(
                Target(f"flood, {_streams(streams)}: lines/s", _rate(flows[OURS]), LINES_PER_S, most=False)
                for streams, flows in self.flood.items()
            ),
            *(
                Target(f"paced, {_streams(streams)}: CPU per line", _used(flows[OURS]), USED_US, unit=" us")
                for streams, flows in self.paced.items()
            ),
        ]

    def table(self) -> str:
        """Medians over the turns."""
        paced = [
            (
                name,
                _streams(streams),
                f"{median(flow.handed_us for flow in found):.1f}",
                f"{median(flow.written_us for flow in found):.1f}",
                f"{_used(found):.1f}",
                f"{self.over_floor(streams, name):.2f}",
            )
            for streams, flows in self.paced.items()
            for name, found in flows.items()
        ]
        flood = [
            (name, _streams(streams), f"{_rate(found):,.0f}")
            for streams, flows in self.flood.items()
            for name, found in flows.items()
        ]
        return text_of(
            [
                Table(
                    f"paced: us of the server's CPU for each line, a line every {1e3 * _PACE_S:.0f} ms",
                    ("", "", "handed", "written", "both", "over floor"),
                    paced,
                ),
                Table("flood", ("", "", "lines/s"), flood),
            ],
            f"Medians of {self.turns} turns; over floor: the median of each turn's ratio.",
        )

    def over_floor(self, streams: int, name: str) -> float:
        """How many times what the floor takes."""
        flows = self.paced[streams]
        pairs = zip(flows[name], flows[FLOOR], strict=True)
        return median(flow.used_us / floor.used_us for flow, floor in pairs)

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {"turns": self.turns, "paced": _columns(self.paced), "flood": _columns(self.flood)}

    def plot(self, path: Path) -> None:
        """Two charts."""
        from matplotlib.figure import Figure  # there for those who draw

        from scripts.tools.bench.common.figure import Bars, draw_bars

        figure = Figure(figsize=(12, 4.5), layout="constrained")
        used, rates = figure.subplots(1, 2)
        used.set_title(f"CPU of the server for each line, a line every {1e3 * _PACE_S:.0f} ms, us")
        used.set_yscale("log")
        groups = [_streams(streams) for streams in self.paced]
        bars = [Bars(name, [_used(flows[name]) for flows in self.paced.values()]) for name in _names(self.paced)]
        draw_bars(used, groups, bars, room=float("inf"))
        used.set_ylim(bottom=1)
        used.axhline(USED_US, color="black", linestyle="dashed", lw=1)
        rates.set_title("Lines/s, as fast as it goes, thousands")
        groups = [_streams(streams) for streams in self.flood]
        thousands = {name: [_rate(flows[name]) / 1e3 for flows in self.flood.values()] for name in _names(self.flood)}
        # the place of the floor stays empty: names keep their colours
        series = [Bars(name, thousands.get(name, [None] * len(groups))) for name in _names(self.paced)]
        draw_bars(rates, groups, series, room=float("inf"))
        rates.axhline(LINES_PER_S / 1e3, color="black", linestyle="dashed", lw=1)
        figure.legend(*used.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, dpi=110)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="of each server (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="of a paced load (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=100_000, metavar="N", help="of a flood (default: %(default)s)")
    parser.add_argument(
        "--streams", type=_numbers, default=(1, 4, 16), metavar="N,...", help="of a paced load (default: 1,4,16)"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> WireReport:
    """The whole benchmark. ValueError when the options make no sense, or a server breaks."""
    if min(arguments.turns, arguments.steps, *arguments.streams) < 1 or arguments.lines < 1000:
        raise ValueError("turns, steps and streams are at least 1, and a flood has a thousand lines")
    names = [OURS, FLOOR]
    if importlib.util.find_spec("transformers") is None:
        say(f"{MLX_LM} is left out: it needs transformers")
    else:
        names.append(MLX_LM)
    paced, flood = {}, {}
    for streams in arguments.streams:
        say(f"paced, {_streams(streams)} ...")
        load = Load(streams, arguments.steps, _PACE_S)
        paced[streams] = take_turns({name: partial(measure, SERVERS[name], load) for name in names}, arguments.turns)
    for streams in sorted({min(arguments.streams), max(arguments.streams)}):
        say(f"flood, {_streams(streams)} ...")
        flooded = {
            name: partial(measure, SERVERS[name], Load(streams, arguments.lines // share // streams, 0.0))
            for name, share in _FLOOD_SHARE.items()
            if name in names
        }
        flood[streams] = take_turns(flooded, arguments.turns)
    return WireReport(arguments.turns, paced, flood)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from error


def _streams(number: int) -> str:
    return f"{number} streams" if number > 1 else "1 stream"


def _used(flows: Sequence[Flow]) -> float:
    return median(flow.used_us for flow in flows)


def _rate(flows: Sequence[Flow]) -> float:
    return median(flow.lines_per_s for flow in flows)


def _names(found: Mapping[int, Mapping[str, Sequence[Flow]]]) -> list[str]:
    return list(next(iter(found.values())))


def _columns(found: Mapping[int, Mapping[str, Sequence[Flow]]]) -> Mapping[str, object]:
    return {
        str(streams): {name: [flow._asdict() for flow in flows] for name, flows in by_name.items()}
        for streams, by_name in found.items()
    }
