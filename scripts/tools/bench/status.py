"""`scripts/bench status`: how long a host waits for the status of a server that is at work.

A random Llama of 11 million parameters behind real processes. Another process asks each of them every few milliseconds,
in turns over a connection that is kept (mlx_lm.server keeps none) and over a fresh one, as hosts do.

idle       nothing runs
prefill    prompts of 2,000 tokens that were never seen are read, one after the other
decode N   N streams are written, one answer after the other
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scripts.tools import ROOT
from scripts.tools.bench.asking import SHORT_TOKENS, ask
from scripts.tools.bench.llamas import M10, Prompts, Size
from scripts.tools.bench.polling import Waits
from scripts.tools.bench.report import Table, Target, percentile, text_of
from scripts.tools.bench.servers import other_runner, this_runner
from scripts.tools.bench.stage import OURS, Served, serve, servers
from scripts.tools.bench.turns import take_turns

P99_MS = 10.0
STREAMS = (1, 8)
IDLE, PREFILL = "idle", "prefill"
PHASES = (IDLE, PREFILL, *(f"decode {streams}" for streams in STREAMS))
_WARM_S = 0.3
_MOST_S = 120.0
_P99 = 99
_ANSWER_TOKENS = 256


class StatusReport(NamedTuple):
    """By phase, by server, turn by turn."""

    turns: int
    waits: Mapping[str, Mapping[str, Sequence[Waits]]]

    @property
    def targets(self) -> Sequence[Target]:
        """Of ours at work, over connections of both kinds."""
        return [
            Target(f"{phase}: p99", 1e3 * percentile(_all(by_name[OURS]), _P99), P99_MS, unit=" ms")
            for phase, by_name in self.waits.items()
            if phase != IDLE
        ]

    def table(self) -> str:
        """Over the waits of all turns."""
        rows = [
            (f"{phase}, {name}", *_told([one.kept for one in found]), *_told([one.fresh for one in found]))
            for phase, by_name in self.waits.items()
            for name, found in by_name.items()
        ]
        columns = ("", *(f"{kind} {what}" for kind in Waits._fields for what in ("p50", "p99", "worst")))
        return text_of([Table("until the whole answer, ms", columns, rows)], f"Of all waits of {self.turns} turns.")

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {
            "turns": self.turns,
            "waits_s": {
                phase: {name: [one._asdict() for one in found] for name, found in by_name.items()}
                for phase, by_name in self.waits.items()
            },
        }

    def plot(self, path: Path) -> None:
        """One chart of the 99th percentiles."""
        from matplotlib.figure import Figure  # there for those who draw

        from scripts.tools.bench.bars import Bars, draw_bars

        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.set_title("Status: 99th percentile of the waits, ms")
        axes.set_yscale("log")
        names = list(next(iter(self.waits.values())))
        bars = [
            Bars(name, [1e3 * percentile(_all(by_name[name]), _P99) for by_name in self.waits.values()])
            for name in names
        ]
        draw_bars(axes, list(self.waits), bars, room=float("inf"), digits=1)
        axes.set_ylim(bottom=0.1)
        axes.axhline(P99_MS, color="black", linestyle="dashed", lw=1)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=110)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="of each server (default: %(default)s)")
    parser.add_argument(
        "--polls", type=int, default=100, metavar="N", help="of each kind in a turn (default: %(default)s)"
    )
    parser.add_argument(
        "--interval-ms", type=float, default=10.0, metavar="N", help="between two polls (default: %(default)s)"
    )
    parser.add_argument("--prompt", type=int, default=2000, metavar="N", help="tokens (default: %(default)s)")


def run(arguments: argparse.Namespace, say: Callable[[str], None], size: Size = M10) -> StatusReport:
    """The whole benchmark. ValueError when the options make no sense, or a server breaks."""
    if min(arguments.turns, arguments.polls, arguments.prompt) < 1 or arguments.interval_ms <= 0:
        raise ValueError("turns, polls and tokens are at least 1, and there is time between polls")
    places = max(STREAMS)
    wanted = servers(
        this_runner(OURS, places, blas=arguments.blas, blas_threads=arguments.blas_threads),
        [other_runner(name, command, places) for name, command in arguments.peer],
        arguments.blas,
        arguments.blas_threads,
        say,
    )
    prompts, waits = Prompts(arguments.seed), {}
    with asyncio.Runner() as loop, ExitStack() as stack:
        contenders = serve(size, arguments.seed, wanted, stack, loop)
        for phase in PHASES:
            say(f"{phase} ...")
            polls = {
                name: partial(_run, loop, contender, phase, prompts, arguments)
                for name, contender in contenders.items()
            }
            waits[phase] = take_turns(polls, arguments.turns)
    return StatusReport(arguments.turns, waits)


def _run(loop: asyncio.Runner, contender: Served, phase: str, prompts: Prompts, arguments: argparse.Namespace) -> Waits:
    return loop.run(_measure(contender, phase, prompts, arguments))


async def _measure(contender: Served, phase: str, prompts: Prompts, arguments: argparse.Namespace) -> Waits:
    """One turn of one server."""

    async def keep_busy(prompt_tokens: int, tokens: int) -> None:
        while True:
            await ask(contender.endpoint, prompts.text(prompt_tokens), tokens)

    busy: list[asyncio.Task[None]] = []
    if phase == PREFILL:
        busy = [asyncio.create_task(keep_busy(arguments.prompt, 1))]
    elif phase != IDLE:
        streams = int(phase.rpartition(" ")[2])
        busy = [asyncio.create_task(keep_busy(SHORT_TOKENS, _ANSWER_TOKENS)) for _ in range(streams)]
    try:
        await asyncio.sleep(_WARM_S)
        waits = await _poll(contender, arguments.polls, arguments.interval_ms / 1e3)
        for task in busy:
            if task.done():
                task.result()  # raises what broke it: what was measured was no work
    finally:
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
    await ask(contender.endpoint, prompts.text(SHORT_TOKENS), 1)  # what was left is over
    return waits


async def _poll(contender: Served, count: int, interval_s: float) -> Waits:
    words = (
        "-m",
        "scripts.tools.bench.polling",
        str(contender.process.port),
        contender.process.generation.ready_path,
        str(count),
        str(interval_s),
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_MOST_S):
            told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise ValueError("the status was not answered")
    return Waits(*json.loads(told))


def _all(found: Iterable[Waits]) -> list[float]:
    return [wait for one in found for kind in one for wait in kind]


def _told(found: Iterable[Sequence[float]]) -> tuple[str, str, str]:
    """In ms."""
    waits = [1e3 * wait for one in found for wait in one]
    if not waits:
        return "-", "-", "-"
    return f"{percentile(waits, 50):.2f}", f"{percentile(waits, _P99):.2f}", f"{max(waits):.2f}"
