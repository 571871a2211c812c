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
import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import NamedTuple

from scripts.tools.bench.llamas import Prompts, make_model, write_model
from scripts.tools.bench.report import Bars, Report, Table, Target, interleave, median_ratio
from scripts.tools.bench.servers import MLX_LM, OURS, SHORT_TOKENS, SIZES, Server, answer, default_sizes, servers
from scripts.tools.host.lib import LoadError, Process, write_decoys

LATER = 3
"""Requests after the first one."""
_TOKENS = 16
_POLL_S, _REST_S = 0.002, 0.2
PATIENCE_S = 60.0


class Started(NamedTuple):
    """From the spawn until the first 200, and until the first token of a request that is sent then."""

    ready_s: float
    token_s: float


class Took(NamedTuple):
    """From sending a request until its first token, and until the whole answer is there."""

    token_s: float
    whole_s: float


class First(NamedTuple):
    """The first request of a process, and the median of later ones."""

    first: Took
    later: Took

    @property
    def ratio(self) -> Took:
        return Took(*(one / other for one, other in zip(self.first, self.later, strict=True)))


def start(server: Server, model: Path, prompts: Prompts, libraries: Path | None = None) -> Started:
    """Measures a process that answers one short request. `libraries` is the host's own directory, put in front of all
    others."""
    spawned = perf_counter()
    with _launched(server, model, libraries) as process:
        ready_s = _wait_ready(process, spawned) - spawned
        at = perf_counter() - spawned
        return Started(ready_s, at + _ask(server, process, model, prompts.text(SHORT_TOKENS)).token_s)


def ask_first(server: Server, model: Path, prompts: Prompts, length: int) -> First:
    """Measures a process that answers one prompt of so many tokens, and then others. It rests before each of them."""
    with _launched(server, model, None) as process:
        _wait_ready(process, perf_counter())
        first, *later = [_ask_rested(server, process, model, prompts.text(length)) for _ in range(1 + LATER)]
    return First(first, Took(*map(median, zip(*later, strict=True))))


@contextmanager
def _launched(server: Server, model: Path, libraries: Path | None) -> Iterator[Process]:
    process = server.launch(model, libraries)
    try:
        yield process
    finally:
        process.kill()


def _wait_ready(process: Process, since: float) -> float:
    """Waits for the first 200 and returns its time. Raises `LoadError`.

    A host asks every 100 ms, with a client that costs more than what is measured: this one writes bytes to a socket.
    """
    path = process.generation.ready_path
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
    while True:
        try:
            with closing(socket.create_connection(("127.0.0.1", process.port), PATIENCE_S)) as connection:
                connection.sendall(request)
                if connection.recv(64).split(maxsplit=2)[1:2] == [b"200"]:
                    return perf_counter()
        except OSError:
            pass  # it does not listen yet
        now = perf_counter()
        if process.exit_status is not None or now - since > PATIENCE_S:
            raise LoadError(process.output.captured or f"exit status {process.exit_status}")
        sleep(_POLL_S)


def _ask_rested(server: Server, process: Process, model: Path, prompt: str) -> Took:
    sleep(_REST_S)
    return _ask(server, process, model, prompt)


def _ask(server: Server, process: Process, model: Path, prompt: str) -> Took:
    """By a client of its own: what one pays for its first request, all pay."""

    async def ask() -> Took:
        endpoint = server.endpoint(process, model)
        answered = await answer(endpoint, prompt, _TOKENS)
        await endpoint.close()
        return Took(answered.first_s, answered.times[-1] - answered.sent)

    return asyncio.run(ask())


WITH_LIBRARIES = "host's libs"
OF_MLX_LM = 0.28
"""Until the first 200 with the smallest model, over mlx_lm.server's."""
FIRST_OVER_LATER = 1.2
FIRST_SIZES = ("1M", "10M")
LENGTHS = (16, 200)
"""Of the prompts of `first`, in tokens."""


Firsts = Mapping[tuple[str, int, str], Sequence[First]]
"""By the size of the model, the length of the prompt, and contender, turn by turn."""


def report(turns: int, started: Mapping[str, Mapping[str, Sequence[Started]]], firsts: Firsts) -> Report:
    """Returns the results; `started` is by the size of the model and by contender. The target of the start holds for
    the smallest model."""
    names = list(dict.fromkeys(name for by_name in started.values() for name in by_name))
    targets = []
    if MLX_LM in (by_name := started.get("1M", {})):
        ours, theirs = ([one.ready_s for one in by_name[name]] for name in (OURS, MLX_LM))
        targets.append(Target(f"1M, spawn to 200 over {MLX_LM}", median_ratio(ours, theirs), OF_MLX_LM))
    rows, ratios = [], dict[str, list[float | None]]()
    for (size, length, name), found in firsts.items():
        cells = []
        for part, what in enumerate(("first token", "whole")):
            ratio = median(one.ratio[part] for one in found)
            cells += [_ms(one.first[part] for one in found), _ms(one.later[part] for one in found), f"{ratio:.2f}"]
            if name == OURS:
                title = f"{size}, prompt of {length}: first request over later ones, {what}"
                targets.append(Target(title, ratio, FIRST_OVER_LATER))
                ratios.setdefault(what, []).append(ratio)
        rows.append((f"{name}, {size}, {length} tokens", *cells))
    parts = [(size, part) for size in started for part in Started._fields]
    groups = [f"{size}\n{'200' if part == 'ready_s' else 'first token'}" for size, part in parts]
    starts = {
        name: [1e3 * median(getattr(one, part) for one in started[size][name]) for size, part in parts]
        for name in names
    }
    prompts = [f"{size}\nprompt of {length}" for size, length, name in firsts if name == OURS]
    columns = ("", *(f"{size} {what}" for size in started for what in ("200", "token")))
    return Report(
        targets,
        [
            Table(
                f"start: ms from the spawn, medians of {turns} turns",
                columns,
                [(name, *(f"{ms:.0f}" for ms in starts[name])) for name in names],
            ),
            Table(
                "first: the first request after the start and later ones, ms, medians",
                ("", "first token", "later", "ratio", "whole answer", "later", "ratio"),
                rows,
            ),
        ],
        [
            Bars("ms from the spawn", groups, starts),
            Bars("the first request over later ones, ours", prompts, ratios, digits=2, target=FIRST_OVER_LATER),
        ],
        {
            "turns": turns,
            "started": {
                size: {name: [one._asdict() for one in found] for name, found in by_name.items()}
                for size, by_name in started.items()
            },
            "first": {
                f"{name}, {size}, {length}": [
                    {"first": one.first._asdict(), "later": one.later._asdict()} for one in found
                ]
                for (size, length, name), found in firsts.items()
            },
        },
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", action="append", choices=SIZES, help="this model only; may be repeated")
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="of each contender (default: %(default)s)")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """The whole benchmark. ValueError when the options make no sense, or a contender does not start."""
    if arguments.turns < 1:
        raise ValueError("there is at least one turn")
    contenders = servers(arguments, say)
    ours, runners = contenders[0], [server for server in contenders if not server.speaks_openai]
    started: dict[str, dict[str, list[Started]]] = {}
    firsts = dict[tuple[str, int, str], list[First]]()
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
                    found = interleave(alone, arguments.turns, warm=0)
                    firsts |= {(size, length, name): turns_of for name, turns_of in found.items()}
    except LoadError as error:
        raise ValueError(f"a contender did not start: {error}") from error
    return report(arguments.turns, started, firsts)


def _ms(seconds: Iterable[float]) -> str:
    return f"{1e3 * median(seconds):.0f}"
