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
from typing import NamedTuple

from runner.model.weights.dtype import device
from scripts.tools.bench.bare_loop import BareLoop
from scripts.tools.bench.llamas import Prompts
from scripts.tools.bench.report import Report, Table, Target, interleave, median_ratio
from scripts.tools.bench.servers import (
    BARE,
    BARE_ONE_CORE,
    MLX_LM,
    OURS,
    SHORT_TOKENS,
    SIZES,
    Endpoint,
    answer,
    default_sizes,
    serve,
    servers,
)

TOKENS = {"1M": 200, "10M": 100, "60M": 40, "700M": 200, "3B": 200}
"""Of a turn: short ones, for what disturbs the machine comes and goes within seconds."""
OF_BARE = {"1M": 0.88, "10M": 0.95, "60M": 0.95}
"""The least that is to be reached of the faster bare loop."""


class Decoded(NamedTuple):
    """One model: tokens per second of each contender, turn by turn."""

    size: str
    speeds: Mapping[str, Sequence[float]]

    def ratio(self, name: str, other: str) -> float:
        return median_ratio(self.speeds[name], self.speeds[other])

    @property
    def of_bare(self) -> float:
        return min(self.ratio(OURS, name) for name in (BARE, BARE_ONE_CORE) if name in self.speeds)


def report(turns: int, models: Sequence[Decoded]) -> Report:
    targets = []
    for model in models:
        if bound := OF_BARE.get(model.size):
            targets.append(Target(f"{model.size}, ours over the {BARE}", model.of_bare, bound, most=False))
        if MLX_LM in model.speeds:
            targets.append(Target(f"{model.size}, ours over {MLX_LM}", model.ratio(OURS, MLX_LM), 1.0, most=False))
    names = list(dict.fromkeys(name for model in models for name in model.speeds))
    ratios = {name: [model.ratio(name, BARE) for model in models] for name in names}
    rows = [
        (name, *(f"{median(model.speeds[name]):.1f}" for model in models), *(f"{each:.3f}" for each in ratios[name]))
        for name in names
    ]
    columns = ("", *(f"{model.size} tok/s" for model in models), *(f"{model.size} / bare" for model in models))
    title = f"decode, one stream: medians of {turns} turns, and of each turn's ratio to the bare loop"
    figures = {
        model.size: {
            "tokens_per_s": model.speeds,
            "of_bare": {name: model.ratio(name, BARE) for name in model.speeds},
        }
        for model in models
    }
    return Report(
        targets,
        [Table(title, columns, rows)],
        {"turns": turns, "models": figures},
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", action="append", choices=SIZES, help="this model only; may be repeated")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    models = []
    for name in arguments.size or default_sizes():
        say(f"{name} ...")
        models.append(_measure(name, arguments, say))
    return report(arguments.turns, models)


def _measure(name: str, arguments: argparse.Namespace, say: Callable[[str], None]) -> Decoded:
    blas, threads, seed = arguments.blas, arguments.blas_threads, arguments.seed
    size, tokens, prompts = SIZES[name], TOKENS[name], Prompts(seed)
    with asyncio.Runner() as loop, ExitStack() as stack:
        loops = {BARE: BareLoop(size, seed, stack, blas=blas, blas_threads=threads)}
        if device() == "cpu" and hasattr(os, "sched_setaffinity"):
            loops[BARE_ONE_CORE] = BareLoop(size, seed, stack, blas=blas, blas_threads=threads, cores=1)
        served = serve(size, seed, servers(arguments, say), stack, loop)

        def served_speed(endpoint: Endpoint) -> float:
            return loop.run(answer(endpoint, prompts.text(SHORT_TOKENS), tokens)).tokens_per_s

        def bare_speed(bare: BareLoop) -> float:
            return bare.decode([prompts.ids(SHORT_TOKENS)], tokens)

        contenders: dict[str, Callable[[], float]] = {
            **{each: partial(served_speed, one) for each, one in served.items()},
            **{each: partial(bare_speed, bare) for each, bare in loops.items()},
        }
        return Decoded(name, interleave(contenders, arguments.turns))
