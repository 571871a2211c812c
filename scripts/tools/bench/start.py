"""`scripts/bench start`: from the spawn to the first answer.

Random Llamas of 1, 10 and 60 million parameters. Every turn of a contender is a process of its own, spawned as a host
spawns its runner. What lies on disk is in the page cache.

start  from the spawn until /v1/status (mlx_lm.server: /health, which does not wait for the model) answers 200, asked
       every 2 ms, and until the first token of a prompt of 16 tokens, sent at once
"""

import argparse
import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import NamedTuple

from scripts.tools.bench.llamas import Prompts, make_model, write_model
from scripts.tools.bench.report import Report, Table, Target, interleave, median_ratio
from scripts.tools.bench.servers import (
    FEW_TOKENS,
    MLX_LM,
    OURS,
    SHORT_TOKENS,
    SIZES,
    Server,
    answer,
    default_sizes,
    servers,
)
from scripts.tools.host.lib import LoadError, Process

_POLL_S = 0.002
PATIENCE_S = 60.0


class Started(NamedTuple):
    """From the spawn until the first 200, and until the first token of a request that is sent then."""

    ready_s: float
    token_s: float


def start(server: Server, model: Path, prompts: Prompts) -> Started:
    spawned = perf_counter()
    with server.launch(model) as process:
        ready_s = _wait_ready(process, spawned) - spawned

        async def first_token_s() -> float:
            endpoint = server.endpoint(process, model)  # a new client: all contenders pay for its first connection
            answered = await answer(endpoint, prompts.text(SHORT_TOKENS), FEW_TOKENS)
            await endpoint.close()
            return answered.first_s

        at = perf_counter() - spawned
        return Started(ready_s, at + asyncio.run(first_token_s()))


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


OF_MLX_LM = 0.28
"""Until the first 200 with the smallest model, over mlx_lm.server's."""


def report(turns: int, started: Mapping[str, Mapping[str, Sequence[Started]]]) -> Report:
    """Returns the results; `started` is by the size of the model and by contender. The target holds for the smallest
    model."""
    names = list(dict.fromkeys(name for by_name in started.values() for name in by_name))
    targets = []
    if MLX_LM in (by_name := started.get("1M", {})):
        ours, theirs = ([one.ready_s for one in by_name[name]] for name in (OURS, MLX_LM))
        targets.append(Target(f"1M, spawn to 200 over {MLX_LM}", median_ratio(ours, theirs), OF_MLX_LM))
    rows = [
        (
            name,
            *(
                f"{1e3 * median(getattr(one, part) for one in by_name[name]):.0f}"
                for by_name in started.values()
                for part in Started._fields
            ),
        )
        for name in names
    ]
    columns = ("", *(f"{size} {what}" for size in started for what in ("200", "token")))
    figures = {
        size: {name: [one._asdict() for one in found] for name, found in by_name.items()}
        for size, by_name in started.items()
    }
    return Report(
        targets,
        [Table(f"start: ms from the spawn, medians of {turns} turns", columns, rows)],
        {"turns": turns, "started": figures},
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", action="append", choices=SIZES, help="this model only; may be repeated")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Runs the benchmark. Raises ValueError if the options make no sense, or a contender does not start."""
    contenders = servers(arguments, say)
    started: dict[str, dict[str, list[Started]]] = {}
    try:
        for size in arguments.size or default_sizes():
            say(f"{size} ...")
            with ExitStack() as stack, TemporaryDirectory(prefix="bench-start-") as folder:
                model = Path(folder)
                write_model(model, make_model(SIZES[size], arguments.seed), SIZES[size])
                prompts = Prompts(arguments.seed)
                turns = {
                    server.name: partial(start, server, server.prepare(model, stack), prompts) for server in contenders
                }
                started[size] = interleave(turns, arguments.turns)
    except LoadError as error:
        raise ValueError(f"a contender did not start: {error}") from error
    return report(arguments.turns, started)
