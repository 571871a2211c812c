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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from scripts.tools.bench.common.contenders import MLX_LM, OURS, SIZES, default_sizes, servers
from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.report import Report, Table, Target, median_ratio
from scripts.tools.bench.llamas import Prompts, make_model, write_model
from scripts.tools.bench.start_process import First, Started, Took, ask_first, start
from scripts.tools.host.lib import LoadError, write_decoys

WITH_LIBRARIES = "host's libs"
OF_MLX_LM = 0.28
"""Until the first 200 with the smallest model, over mlx_lm.server's."""
FIRST_OVER_LATER = 1.2
FIRST_SIZES = ("1M", "10M")
LENGTHS = (16, 200)
"""Of the prompts of `first`, in tokens."""


@dataclass(frozen=True)
class StartReport(Report):
    """All of it, turn by turn."""

    turns: int
    started: Mapping[str, Mapping[str, Sequence[Started]]]
    """By the size of the model, by contender."""
    first: Mapping[str, Mapping[int, Mapping[str, Sequence[First]]]]
    """By the size of the model, the length of the prompt, and contender."""

    @property
    def targets(self) -> list[Target]:
        """The targets. Those of the start hold for the smallest model."""
        found = []
        if MLX_LM in (by_name := self.started.get("1M", {})):
            ours, theirs = ([one.ready_s for one in by_name[name]] for name in (OURS, MLX_LM))
            found.append(Target(f"1M, spawn to 200 over {MLX_LM}", median_ratio(ours, theirs), OF_MLX_LM))
        for size, length, name, turns in self._firsts():
            if name == OURS:
                what = f"{size}, prompt of {length}: first request over later ones"
                for at, part in enumerate(("first token", "whole")):
                    found.append(Target(f"{what}, {part}", median(one.ratio[at] for one in turns), FIRST_OVER_LATER))
        return found

    @property
    def tables(self) -> Sequence[Table]:
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
        return [
            Table(f"start: ms from the spawn, medians of {self.turns} turns", columns, starts),
            Table(
                "first: the first request after the start and later ones, ms, medians",
                ("", "first token", "later", "ratio", "whole answer", "later", "ratio"),
                firsts,
            ),
        ]

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

    @property
    def charts(self) -> Sequence[Chart]:
        """Milliseconds from the spawn; the first request over later ones."""
        names = dict.fromkeys(name for by_name in self.started.values() for name in by_name)
        parts = [(size, part) for size in self.started for part in Started._fields]
        starts = {
            name: [1e3 * median(getattr(one, part) for one in self.started[size][name]) for size, part in parts]
            for name in names
        }
        groups = [f"{size}\n{'200' if part == 'ready_s' else 'first token'}" for size, part in parts]
        cells = [(size, length, turns) for size, length, name, turns in self._firsts() if name == OURS]
        firsts = {
            what: [median(one.ratio[part] for one in turns) for *_, turns in cells]
            for part, what in enumerate(("until the first token", "whole answer"))
        }
        prompts = [f"{size}\nprompt of {length}" for size, length, _ in cells]
        return [
            Bars("ms from the spawn", groups, starts),
            Bars("the first request over later ones, ours", prompts, firsts, digits=2, target=FIRST_OVER_LATER),
        ]

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
    contenders = servers(arguments, say)
    ours, runners = contenders[0], [server for server in contenders if not server.speaks_openai]
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
                started[size] = interleave(turns, arguments.turns)
                for length in LENGTHS if size in FIRST_SIZES else ():
                    alone = {each.name: partial(ask_first, each, model, prompts, length) for each in runners}
                    first.setdefault(size, {})[length] = interleave(alone, arguments.turns, warm=0)
    except LoadError as error:
        raise ValueError(f"a contender did not start: {error}") from error
    return StartReport(arguments.turns, started, first)


def _ms(seconds: Iterable[float]) -> str:
    return f"{1e3 * median(seconds):.0f}"
