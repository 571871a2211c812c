"""`scripts/bench wire`: the cost of lines between the engine's thread and the clients, without a model.

The runner's own app and outbox run in a process of their own; a thread in place of the engine sends every stream one
word a step, and the client reads as fast as it can.

paced   a line every 10 ms for every stream: microseconds of the server's CPU for each line. The engine's thread spends
        `handed` to hand lines over, all others spend `written` to write them
flood   no pause between steps: lines per second

`floor` is the same between two threads and a socket, with nothing else in the process: with few streams nearly all of
the paced cost is the system's, which wakes a thread and writes to a socket on a processor that sleeps between two
steps.
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
from scripts.tools.bench.common.report import Report, Table, Target, median_ratio
from scripts.tools.bench.micro.wire_server import WORD, Load, Used

OURS, FLOOR = "ours", "floor"
MODULES = {OURS: "wire_server", FLOOR: "wire_floor"}
OF_FLOOR = 2.0
"""The most CPU for each line, over that of the floor."""
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
    """By contender and number of streams, turn by turn."""

    turns: int
    paced: Mapping[str, Mapping[int, Sequence[Flow]]]
    flood: Mapping[str, Mapping[int, Sequence[Flow]]]

    @property
    def targets(self) -> list[Target]:
        """Against the floor, the medians of each turn's ratio."""
        return [
            Target(f"paced, {_streams(streams)}: CPU per line, {OURS} over {FLOOR}", self.ratio(streams), OF_FLOOR)
            for streams in self.paced[OURS]
        ]

    def ratio(self, streams: int) -> float:
        """Returns the CPU for each line of a paced load, over that of the floor."""
        return median_ratio(*([flow.used_us for flow in self.paced[name][streams]] for name in (OURS, FLOOR)))

    @property
    def tables(self) -> Sequence[Table]:
        """Medians over the turns."""
        rows = [
            (
                f"{name}, {_streams(streams)}",
                f"{median(flow.handed_us for flow in flows):.1f}",
                f"{median(flow.written_us for flow in flows):.1f}",
                f"{_used(flows):.1f}",
                f"{_rate(self.flood[name][streams]):,.0f}" if streams in self.flood[name] else "",
            )
            for name, paced in self.paced.items()
            for streams, flows in paced.items()
        ]
        title = f"us of CPU for each line, one every {1e3 * _PACE_S:.0f} ms, and a flood; medians of {self.turns} turns"
        return [Table(title, ("", "handed", "written", "both", "flood, lines/s"), rows)]

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {"turns": self.turns, "paced": _columns(self.paced), "flood": _columns(self.flood)}

    @property
    def charts(self) -> Sequence[Chart]:
        """CPU for each line."""
        used = {name: [_used(flows) for flows in paced.values()] for name, paced in self.paced.items()}
        title = f"CPU of the server for each line, a line every {1e3 * _PACE_S:.0f} ms, us"
        return [Bars(title, [*map(_streams, self.paced[OURS])], used, digits=1)]


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
    paced = [Load(streams, arguments.steps, _PACE_S) for streams in arguments.streams]
    floods = [Load(streams, arguments.lines // streams, 0.0) for streams in flooded]
    say(f"{len(paced) + len(floods)} loads in {arguments.turns} turns ...")
    contenders = {(name, load): partial(measure, name, load) for load in (*paced, *floods) for name in MODULES}
    found = interleave(contenders, arguments.turns)
    return WireReport(
        arguments.turns,
        *({name: {load.streams: found[name, load] for load in loads} for name in MODULES} for loads in (paced, floods)),
    )


def measure(name: str, load: Load) -> Flow:
    """Starts a contender, reads all streams, and ends it. ValueError if a line is missing."""
    command = [sys.executable, "-m", f"scripts.tools.bench.micro.{MODULES[name]}", *map(str, load)]
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


def _columns(found: Mapping[str, Mapping[int, Sequence[Flow]]]) -> Mapping[str, object]:
    return {
        name: {str(streams): [flow._asdict() for flow in flows] for streams, flows in loads.items()}
        for name, loads in found.items()
    }
