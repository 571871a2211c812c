"""`scripts/bench decode`: tokens per second of one stream, at the client, against the loop without a server.

Random Llamas of 1, 10 and 60 million parameters, on a GPU of 10, 700 and 2,800 million. The contenders are processes
that run from the beginning to the end and rest while another one is measured. `bare loop` is the model, mlx-lm's caches
and a loop. Counted from the first token to the last.
"""

import argparse
import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median

from runner.device import device
from scripts.tools.bench.bare_loop import BareLoop
from scripts.tools.bench.llamas import Prompts
from scripts.tools.bench.report import Report, Table, Target, interleave, median_ratio
from scripts.tools.bench.servers import (
    BARE,
    BARE_ONE_CORE,
    OURS,
    PEERS,
    SHORT_TOKENS,
    SIZES,
    Endpoint,
    answer,
    default_sizes,
    random_model,
    serve,
    servers,
)

TOKENS = {"1M": 200, "10M": 100, "10M-packed": 100, "60M": 40, "700M": 200, "3B": 200}
"""Of a turn: short ones, for what disturbs the machine comes and goes within seconds."""
OF_BARE = {"1M": 0.88, "10M": 0.95, "60M": 0.95}
"""The least that is to be reached of the faster bare loop."""


Speeds = Mapping[str, Sequence[float]]
"""Tokens per second of each contender, turn by turn."""


def report(turns: int, models: Mapping[str, Speeds]) -> Report:
    """Returns the results; `models` is by size."""
    targets = []
    of_bare = {
        size: {name: median_ratio(each, speeds[BARE]) for name, each in speeds.items()}
        for size, speeds in models.items()
    }
    for size, speeds in models.items():
        if bound := OF_BARE.get(size):
            least = min(median_ratio(speeds[OURS], speeds[name]) for name in (BARE, BARE_ONE_CORE) if name in speeds)
            targets.append(Target(f"{size}, ours over the {BARE}", least, bound, most=False))
        for peer in filter(speeds.__contains__, PEERS):
            ratio = median_ratio(speeds[OURS], speeds[peer])
            targets.append(Target(f"{size}, ours over {peer}", ratio, 1.0, most=False))
    names = dict.fromkeys(name for speeds in models.values() for name in speeds)
    rows = [
        (
            name,
            *(f"{median(speeds[name]):.1f}" for speeds in models.values()),
            *(f"{ratios[name]:.3f}" for ratios in of_bare.values()),
        )
        for name in names
    ]
    columns = ("", *(f"{size} tok/s" for size in models), *(f"{size} / bare" for size in models))
    title = f"decode, one stream: medians of {turns} turns, and of each turn's ratio to the bare loop"
    figures = {size: {"tokens_per_s": speeds, "of_bare": of_bare[size]} for size, speeds in models.items()}
    return Report(targets, [Table(title, columns, rows)], {"turns": turns, "models": figures})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", action="append", choices=SIZES, help="this model only; may be repeated")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    models = {}
    for name in arguments.size or default_sizes():
        say(f"{name} ...")
        models[name] = _measure(name, arguments, say)
    return report(arguments.turns, models)


def _measure(name: str, arguments: argparse.Namespace, say: Callable[[str], None]) -> Speeds:
    seed, size, tokens = arguments.seed, SIZES[name], TOKENS[name]
    prompts = Prompts(seed)
    with asyncio.Runner() as loop, ExitStack() as stack:
        loops = {BARE: BareLoop(size, seed, stack)}
        if device() == "cpu" and hasattr(os, "sched_setaffinity"):
            loops[BARE_ONE_CORE] = BareLoop(size, seed, stack, cores=1)
        served = serve(random_model(size, seed, stack), servers(arguments, say), stack, loop)

        def served_speed(endpoint: Endpoint) -> float:
            return loop.run(answer(endpoint, prompts.text(SHORT_TOKENS), tokens)).tokens_per_s

        def bare_speed(bare: BareLoop) -> float:
            return bare.decode([prompts.ids(SHORT_TOKENS)], tokens)

        contenders: dict[str, Callable[[], float]] = {
            **{each: partial(served_speed, one) for each, one in served.items()},
            **{each: partial(bare_speed, bare) for each, bare in loops.items()},
        }
        return interleave(contenders, arguments.turns)
