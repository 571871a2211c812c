"""`scripts/bench start`: from the spawn to the first answer, and the first request against later ones.

Random Llamas of 1, 10 and 60 million parameters. Every turn of a contender is a process of its own, spawned as a host
spawns its runner. `host's libs` is ours where the host has put its own library directories in front, as all of them do
on Linux: the process must start anew without them. What lies on disk is in the page cache.

start  from the spawn until /v1/status (mlx_lm.server: /health, which does not wait for the model) answers 200, asked
       every 2 ms, and until the first token of a prompt of 16 tokens, sent at once
first  the first request after the start against the median of later ones, all with prompts that were never seen, each
       after the same rest, since a machine that rests answers the next request later
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scripts.tools.bench.common.contenders import MLX_LM, OURS, SIZES, default_sizes, servers
from scripts.tools.bench.common.interleave import take_turns
from scripts.tools.bench.common.report import Table, Target, text_of
from scripts.tools.bench.common.servers import Server, other_runner
from scripts.tools.bench.llamas import Prompts, make_model, write_model
from scripts.tools.bench.start_process import First, Started, Took, ask_first, start
from scripts.tools.conformance.own import RUNNER
from scripts.tools.host.lib import LoadError, write_decoys

WITH_LIBRARIES = "host's libs"
READY_S, OF_MLX_LM = 0.3, 1 / 3
"""Until the first 200 with the smallest model: seconds, and over mlx_lm.server's."""
FIRST_OVER_LATER = 1.2
FIRST_SIZES = ("1M", "10M")
LENGTHS = (16, 200)
"""Of the prompts of `first`, in tokens."""


class StartReport(NamedTuple):
    """All of it, turn by turn."""

    turns: int
    started: Mapping[str, Mapping[str, Sequence[Started]]]
    """By the size of the model, by contender."""
    first: Mapping[str, Mapping[int, Mapping[str, Sequence[First]]]]
    """By the size of the model, the length of the prompt, and contender."""

    @property
    def targets(self) -> list[Target]:
        """Those of the start hold for the smallest model."""
        found = []
        if by_name := self.started.get("1M"):
            found.append(Target("1M, spawn to 200", median(one.ready_s for one in by_name[OURS]), READY_S, unit=" s"))
            if MLX_LM in by_name:
                pairs = zip(by_name[OURS], by_name[MLX_LM], strict=True)
                ratio = median(one.ready_s / other.ready_s for one, other in pairs)
                found.append(Target(f"1M, spawn to 200 over {MLX_LM}", ratio, OF_MLX_LM))
        for size, length, name, turns in self._firsts():
            if name == OURS:
                what = f"{size}, prompt of {length}: first request over later ones"
                for at, part in enumerate(("first token", "whole")):
                    found.append(Target(f"{what}, {part}", median(one.ratio[at] for one in turns), FIRST_OVER_LATER))
        return found

    def table(self) -> str:
        """One for the start, one for the first request."""
        sizes = list(self.started)
        names = list(dict.fromkeys(name for by_name in self.started.values() for name in by_name))
        starts = [
            (name, *(_ms(part) for size in sizes for part in zip(*self.started[size][name], strict=True)))
            for name in names
        ]
        columns = ("", *(f"{size} {what}" for size in sizes for what in ("200", "token")))
        firsts = [
            (
                f"{name}, {size}, {length} tokens",
                *(
                    cell
                    for at in range(len(Took._fields))
                    for cell in (
                        _ms(one.first[at] for one in turns),
                        _ms(one.later[at] for one in turns),
                        f"{median(one.ratio[at] for one in turns):.2f}",
                    )
                ),
            )
            for size, length, name, turns in self._firsts()
        ]
        return text_of(
            [
                Table(f"start: ms from the spawn, medians of {self.turns} turns", columns, starts),
                Table(
                    "first: the first request after the start and later ones, ms, medians",
                    ("", "first token", "later", "ratio", "whole answer", "later", "ratio"),
                    firsts,
                ),
            ]
        )

    def data(self) -> Mapping[str, object]:
        """For JSON. Times are in seconds."""
        started = {
            size: {name: [one._asdict() for one in turns] for name, turns in by_name.items()}
            for size, by_name in self.started.items()
        }
        first: dict[str, dict[str, dict[str, object]]] = {}
        for size, length, name, turns in self._firsts():
            told = [{"first": one.first._asdict(), "later": one.later._asdict()} for one in turns]
            first.setdefault(size, {}).setdefault(str(length), {})[name] = told
        return {"turns": self.turns, "started": started, "first": first}

    def plot(self, path: Path) -> None:
        """Draws the picture."""
        from matplotlib import pyplot

        from scripts.tools.bench.common.figure import Bars, draw_bars

        figure, (starts, firsts) = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
        names = list(dict.fromkeys(name for by_name in self.started.values() for name in by_name))
        groups = [(size, part, what) for size in self.started for part, what in enumerate(("200", "first token"))]
        series = [
            Bars(name, [1e3 * median(one[part] for one in self.started[size][name]) for size, part, _ in groups])
            for name in names
        ]
        draw_bars(starts, [f"{size}\n{what}" for size, _, what in groups], series, room=200)
        starts.axhline(1e3 * READY_S, color="black", linestyle="dashed", lw=1)
        starts.set_title("ms from the spawn")
        starts.legend(frameon=False)
        cells = [cell for cell in self._firsts() if cell[2] == OURS]
        series = [
            Bars(what, [median(one.ratio[part] for one in turns) for *_, turns in cells])
            for part, what in enumerate(("until the first token", "whole answer"))
        ]
        draw_bars(firsts, [f"{size}\nprompt of {length}" for size, length, *_ in cells], series, room=0.2, digits=2)
        firsts.axhline(FIRST_OVER_LATER, color="black", linestyle="dashed", lw=1)
        firsts.set_title("the first request over later ones, ours")
        firsts.set_ylim(top=1.5 * max(FIRST_OVER_LATER, firsts.dataLim.ymax))
        firsts.legend(frameon=False)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)

    def _firsts(self) -> Iterator[tuple[str, int, str, Sequence[First]]]:
        for size, by_length in self.first.items():
            for length, by_name in by_length.items():
                for name, turns in by_name.items():
                    yield size, length, name, turns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument("--size", action="append", choices=SIZES, help="this model only; may be repeated")
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="of each contender (default: %(default)s)")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> StartReport:
    """The whole benchmark. ValueError when the options make no sense, or a contender does not start."""
    if arguments.turns < 1:
        raise ValueError("there is at least one turn")
    blas, threads = arguments.blas, arguments.blas_threads
    ours = Server(OURS, RUNNER, {"MLX_RUNNER_BLAS": blas, "MLX_RUNNER_BLAS_THREADS": str(threads)})
    peers = [other_runner(name, command, 1) for name, command in arguments.peer]
    contenders = servers(ours, peers, blas, threads, say)
    started: dict[str, dict[str, list[Started]]] = {}
    first: dict[str, dict[int, dict[str, list[First]]]] = {}
    try:
        for size in arguments.size or default_sizes():
            say(f"{size} ...")
            with TemporaryDirectory(prefix="bench-start-") as folder:
                model = Path(folder) / "model"
                model.mkdir()
                write_model(model, make_model(SIZES[size], arguments.seed), SIZES[size])
                prompts, libraries = Prompts(arguments.seed), write_decoys(Path(folder) / "lib" / "ollama")
                turns = {WITH_LIBRARIES: partial(start, ours, model, prompts, libraries)}
                turns |= {server.name: partial(start, server, model, prompts) for server in contenders}
                started[size] = take_turns(turns, arguments.turns)
                for length in LENGTHS if size in FIRST_SIZES else ():
                    alone = {each.name: partial(ask_first, each, model, prompts, length) for each in (ours, *peers)}
                    first.setdefault(size, {})[length] = take_turns(alone, arguments.turns, warm=0)
    except LoadError as error:
        raise ValueError(f"a contender did not start: {error}") from error
    return StartReport(arguments.turns, started, first)


def _ms(seconds: Iterable[float]) -> str:
    return f"{1e3 * median(seconds):.0f}"
