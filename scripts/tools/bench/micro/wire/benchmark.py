"""`scripts/bench wire`: what it costs to bring lines from the thread that computes to the clients, without a model.

Each server is a process of its own with a thread in the place of the engine, which tells every stream one word a step;
the client reads as fast as it goes. `ours` is the runner's own app behind its outbox, `mlx_lm.server` its handlers
behind their queues, `bare sockets` two Python threads that wake each other and send the same bytes, with nothing else.

paced   every stream gets a line every 10 ms: CPU of the server for each line, in microseconds. `handed` is what the
        thread that computes spends to hand lines over, `written` what all others spend to write them
flood   as fast as it goes: lines per second

With few streams nearly all of the paced cost is the system's: a thread is woken, a socket written, and the processor
has gone to sleep between two steps. The bare sockets show that.
"""

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.options import numbers
from scripts.tools.bench.common.report import Report, Table, Target, median_ratio
from scripts.tools.bench.micro.wire.client import Flow, Server, measure
from scripts.tools.bench.micro.wire.load import Load

OURS, BARE, MLX_LM = "ours", "bare sockets", "mlx_lm.server"
LINES_PER_S = 200_000
USED_US = 15
_PACE_S = 0.01
_PACKAGE = "scripts.tools.bench.micro.wire"
SERVERS = {
    BARE: Server(f"{_PACKAGE}.bare_sockets", "/", ""),
    OURS: Server(f"{_PACKAGE}.ours", "/completion", '{"Prompt":"xy"}'),
    MLX_LM: Server(f"{_PACKAGE}.mlx_lm_server", "/v1/completions", '{"prompt":"xy","stream":true}'),
}
_FLOOD_SHARE = {OURS: 1, MLX_LM: 10}
"""How many times fewer lines it is flooded with; who is not here has nothing to tell of a flood."""


@dataclass(frozen=True)
class WireReport(Report):
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

    @property
    def tables(self) -> Sequence[Table]:
        """Medians over the turns."""
        paced = [
            (
                name,
                _streams(streams),
                f"{median(flow.handed_us for flow in found):.1f}",
                f"{median(flow.written_us for flow in found):.1f}",
                f"{_used(found):.1f}",
                f"{self.over_bare(streams, name):.2f}",
            )
            for streams, flows in self.paced.items()
            for name, found in flows.items()
        ]
        flood = [
            (name, _streams(streams), f"{_rate(found):,.0f}")
            for streams, flows in self.flood.items()
            for name, found in flows.items()
        ]
        return [
            Table(
                f"paced: us of the server's CPU for each line, a line every {1e3 * _PACE_S:.0f} ms",
                ("", "", "handed", "written", "both", "over bare"),
                paced,
            ),
            Table("flood", ("", "", "lines/s"), flood),
        ]

    @property
    def note(self) -> str:
        """The meaning of the figures."""
        return f"Medians of {self.turns} turns; over bare: the median of each turn's ratio."

    def over_bare(self, streams: int, name: str) -> float:
        """Returns the cost as a multiple of that of the bare sockets."""
        return median_ratio(*([flow.used_us for flow in self.paced[streams][each]] for each in (name, BARE)))

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {"turns": self.turns, "paced": _columns(self.paced), "flood": _columns(self.flood)}

    @property
    def charts(self) -> Sequence[Chart]:
        """CPU for each line, and lines per second. Bare sockets have a gap in the flood: names keep their colours."""
        names = list(next(iter(self.paced.values())))
        used = {name: [_used(flows[name]) for flows in self.paced.values()] for name in names}
        rates = {
            name: [_rate(flows[name]) / 1e3 if name in flows else None for flows in self.flood.values()]
            for name in names
        }
        title = f"CPU of the server for each line, a line every {1e3 * _PACE_S:.0f} ms, us"
        return [
            Bars(title, [*map(_streams, self.paced)], used, log=True, target=USED_US),
            Bars("lines/s, flood, thousands", [*map(_streams, self.flood)], rates, target=LINES_PER_S / 1e3),
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="of each server (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="of a paced load (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=100_000, metavar="N", help="of a flood (default: %(default)s)")
    parser.add_argument(
        "--streams", type=numbers, default=(1, 4, 16), metavar="N,...", help="of a paced load (default: 1,4,16)"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> WireReport:
    """The whole benchmark. ValueError when the options make no sense, or a server breaks."""
    if min(arguments.turns, arguments.steps, *arguments.streams) < 1 or arguments.lines < 1000:
        raise ValueError("turns, steps and streams are at least 1, and a flood has a thousand lines")
    names = [OURS, BARE]
    if importlib.util.find_spec("transformers") is None:
        say(f"{MLX_LM} is left out: it needs transformers")
    else:
        names.append(MLX_LM)
    paced, flood = {}, {}
    for streams in arguments.streams:
        say(f"paced, {_streams(streams)} ...")
        load = Load(streams, arguments.steps, _PACE_S)
        paced[streams] = interleave({name: partial(measure, SERVERS[name], load) for name in names}, arguments.turns)
    for streams in sorted({min(arguments.streams), max(arguments.streams)}):
        say(f"flood, {_streams(streams)} ...")
        flooded = {
            name: partial(measure, SERVERS[name], Load(streams, arguments.lines // share // streams, 0.0))
            for name, share in _FLOOD_SHARE.items()
            if name in names
        }
        flood[streams] = interleave(flooded, arguments.turns)
    return WireReport(arguments.turns, paced, flood)


def _streams(number: int) -> str:
    return f"{number} streams" if number > 1 else "1 stream"


def _used(flows: Sequence[Flow]) -> float:
    return median(flow.used_us for flow in flows)


def _rate(flows: Sequence[Flow]) -> float:
    return median(flow.lines_per_s for flow in flows)


def _columns(found: Mapping[int, Mapping[str, Sequence[Flow]]]) -> Mapping[str, object]:
    return {
        str(streams): {name: [flow._asdict() for flow in flows] for name, flows in by_name.items()}
        for streams, by_name in found.items()
    }
