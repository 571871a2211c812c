"""`scripts/bench wire`: the cost of lines between the engine's thread and the clients, without a model.

The runner's own app and outbox run in a process of their own; a thread in place of the engine sends every stream one
word a step, and the client reads as fast as it can.

paced   a line every 10 ms for every stream: microseconds of the server's CPU for each line. The engine's thread spends
        `handed` to hand lines over, all others spend `written` to write them
flood   no pause between steps: lines per second

With few streams nearly all of the paced cost is the system's: it wakes a thread and writes to a socket, on a processor
that sleeps between two steps.
"""

import argparse
import json
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import NamedTuple

from scripts.tools import ROOT
from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.options import numbers
from scripts.tools.bench.common.report import Report, Table, Target
from scripts.tools.bench.micro.wire_server import WORD, Load, Used

LINES_PER_S = 200_000
USED_US = 15
_PACE_S = 0.01
_WAIT_S = 60.0
_READ_BYTES = 1 << 14  # less than the shortest flood, so that there is a time between the first line and the last
_REQUEST = b'POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n{"Prompt":"xy"}'
_SHOWN = f'"{WORD}"'.encode()


class Flow(NamedTuple):
    """The cost of one load: microseconds of CPU for each line, and lines per second."""

    handed_us: float
    written_us: float
    lines_per_s: float

    @property
    def used_us(self) -> float:
        """By all threads."""
        return self.handed_us + self.written_us

    @classmethod
    def of(cls, load: Load, used: Used, seconds: float) -> "Flow":
        """`seconds` is from the first line to the last."""
        lines = load.streams * load.steps
        return cls(1e6 * used.handed_s / lines, 1e6 * used.written_s / lines, lines / seconds)


@dataclass(frozen=True)
class WireReport(Report):
    """By number of streams, turn by turn."""

    turns: int
    paced: Mapping[int, Sequence[Flow]]
    flood: Mapping[int, Sequence[Flow]]

    @property
    def targets(self) -> list[Target]:
        """Medians."""
        return [
            *(
                Target(f"flood, {_streams(streams)}: lines/s", _rate(flows), LINES_PER_S, most=False)
                for streams, flows in self.flood.items()
            ),
            *(
                Target(f"paced, {_streams(streams)}: CPU per line", _used(flows), USED_US, unit=" us")
                for streams, flows in self.paced.items()
            ),
        ]

    @property
    def tables(self) -> Sequence[Table]:
        """Medians over the turns."""
        rows = [
            (
                _streams(streams),
                f"{median(flow.handed_us for flow in flows):.1f}",
                f"{median(flow.written_us for flow in flows):.1f}",
                f"{_used(flows):.1f}",
                f"{_rate(self.flood[streams]):,.0f}" if streams in self.flood else "",
            )
            for streams, flows in self.paced.items()
        ]
        title = f"us of CPU for each line, one every {1e3 * _PACE_S:.0f} ms, and a flood; medians of {self.turns} turns"
        return [Table(title, ("", "handed", "written", "both", "flood, lines/s"), rows)]

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {"turns": self.turns, "paced": _columns(self.paced), "flood": _columns(self.flood)}

    @property
    def charts(self) -> Sequence[Chart]:
        """CPU for each line."""
        used = {"": [_used(flows) for flows in self.paced.values()]}
        title = f"CPU of the server for each line, a line every {1e3 * _PACE_S:.0f} ms, us"
        return [Bars(title, [*map(_streams, self.paced)], used, digits=1, target=USED_US)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="of each load (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="of a paced load (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=100_000, metavar="N", help="of a flood (default: %(default)s)")
    parser.add_argument(
        "--streams", type=numbers, default=(1, 4, 16), metavar="N,...", help="of a paced load (default: 1,4,16)"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> WireReport:
    """The whole benchmark. ValueError when the options make no sense, or the server breaks."""
    if min(arguments.turns, *arguments.streams) < 1 or arguments.steps < 2 or arguments.lines < 10_000:
        raise ValueError("turns and streams are at least 1, a paced load has 2 steps, a flood 10,000 lines")
    flooded = {min(arguments.streams), max(arguments.streams)}
    loads = {("paced", streams): Load(streams, arguments.steps, _PACE_S) for streams in arguments.streams}
    loads |= {("flood", streams): Load(streams, arguments.lines // streams, 0.0) for streams in flooded}
    say(f"{len(loads)} loads in {arguments.turns} turns ...")
    found = interleave({load: partial(measure, load) for load in loads.values()}, arguments.turns)
    return WireReport(
        arguments.turns,
        *(
            {streams: found[load] for (kind, streams), load in loads.items() if kind == wanted}
            for wanted in ("paced", "flood")
        ),
    )


def measure(load: Load) -> Flow:
    """Starts a server, reads all streams, and ends it. ValueError if a line is missing."""
    command = [sys.executable, "-m", "scripts.tools.bench.micro.wire_server", *map(str, load)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            port = process.stdout.readline()
            if not port:
                raise ValueError("the server did not start")
            seconds = _read(int(port), load)
            used = Used(*json.loads(process.stdout.readline()))
            process.stdin.close()
            process.wait(_WAIT_S)
        finally:
            process.kill()
    return Flow.of(load, used, seconds)


def _read(port: int, load: Load) -> float:
    """Returns the seconds from the first line to the last."""
    received: list[list[bytes]] = []
    first = last = 0.0
    with selectors.DefaultSelector() as selector:
        for _ in range(load.streams):
            client = socket.create_connection(("127.0.0.1", port), _WAIT_S)
            client.sendall(_REQUEST)
            received.append([])
            selector.register(client, selectors.EVENT_READ, received[-1])
        while selector.get_map():
            ready = selector.select(_WAIT_S)
            if not ready:
                raise ValueError("a stream stands still")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(_READ_BYTES)
                if _SHOWN in data:
                    last = perf_counter()
                    first = first or last
                key.data.append(data)
                if not data or data.endswith(b"0\r\n\r\n"):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    check(received, load.steps)
    return last - first


def check(received: Sequence[Sequence[bytes]], lines: int) -> None:
    """Raises ValueError unless every stream got all its lines."""
    for parts in received:
        found = b"".join(parts).count(_SHOWN)
        if found != lines:
            raise ValueError(f"{found} lines came instead of {lines}")


def _streams(number: int) -> str:
    return f"{number} streams" if number > 1 else "1 stream"


def _used(flows: Sequence[Flow]) -> float:
    return median(flow.used_us for flow in flows)


def _rate(flows: Sequence[Flow]) -> float:
    return median(flow.lines_per_s for flow in flows)


def _columns(found: Mapping[int, Sequence[Flow]]) -> Mapping[str, object]:
    return {str(streams): [flow._asdict() for flow in flows] for streams, flows in found.items()}
