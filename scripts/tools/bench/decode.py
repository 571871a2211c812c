"""`scripts/bench decode`: tokens per second of one stream, at the client, against the loop without a server.

Random Llamas of 1, 10 and 60 million parameters, on a GPU of 10, 700 and 2,800 million. The contenders are processes
that run from the beginning to the end and rest while another one is measured. `bare loop` is the model, mlx-lm's caches
and a loop. Counted from the first token to the last. `--drafts` measures what drafts bring instead, by models of
made-up answers.
"""

import argparse
import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from runner.model.weights.dtype import device
from scripts.tools.bench import drafts
from scripts.tools.bench.bare_loop import BareLoop
from scripts.tools.bench.llamas import Prompts, Size
from scripts.tools.bench.report import Bars, Report, Table, Target, interleave, median_ratio
from scripts.tools.bench.servers import (
    BARE,
    BARE_ONE_CORE,
    MLX_LM,
    OURS,
    SHORT_TOKENS,
    SIZES,
    Endpoint,
    Server,
    answer,
    default_sizes,
    serve,
    servers,
)

PARTS = {
    "schedule": "who comes next",
    "forward": "Python builds the graph of the forward",
    "sample": "and that of the sampling",
    "dispatch": "MLX takes it; on a CPU it computes most of it meanwhile",
    "wait": "until the token is there",
    "text": "token to text, stop strings, events",
    "publish": "the numbers of the status",
    "hand over": "events to the event loop",
    "between": "from one step to the next",
}
"""Of a decode step, in the order of time."""
_STEP = "decode"
_FIRST_STEPS = 8  # of which the first ones are others: no forward ahead, buffers of new sizes


class Profile(NamedTuple):
    """Microseconds of each of PARTS in one decode step: medians over `steps` steps."""

    steps: int
    step_us: float
    parts_us: Mapping[str, float]

    def table(self, name: str) -> Table:
        rows = [
            (part, f"{us:.0f}", f"{100 * us / self.step_us:.1f}", PARTS[part]) for part, us in self.parts_us.items()
        ]
        title = f"{name}: where a token's time goes, medians of {self.steps} steps of {self.step_us:.0f} us"
        return Table(title, ("", "us", "%", ""), rows)


def profiled(trace: Path, size: Size, seed: int, ours: Server, tokens: int) -> Profile:
    """Runs our runner with a trace, which stays there, over an answer of so many tokens."""
    trace.parent.mkdir(parents=True, exist_ok=True)
    traced = ours._replace(environment={**ours.environment, "MLX_RUNNER_TRACE": str(trace.resolve())})
    with asyncio.Runner() as loop, ExitStack() as stack:
        ((endpoint, _),) = serve(size, seed, [traced], stack, loop).values()
        prompts = Prompts(seed)
        for _ in range(3):  # what is written when the second one begins is all of the first one at least
            loop.run(answer(endpoint, prompts.text(SHORT_TOKENS), tokens))
    return read(trace.read_text())


def read(text: str) -> Profile:
    """Reads the profile from a trace. ValueError if no answer in it is long enough."""
    lines = [line.rstrip(",") for line in text.splitlines()[1:]]
    events = sorted((json.loads(line) for line in lines if line.endswith("}")), key=lambda event: float(event["ts"]))
    steps = [event for event in events if event["name"] == _STEP][_FIRST_STEPS:]
    if len(steps) < 2:
        raise ValueError("the trace has too few decode steps")
    found: dict[str, list[float]] = defaultdict(list)
    parts = iter(event for event in events if event["name"] in PARTS)
    part = next(parts, None)
    for step, following in pairwise(steps):
        end = step["ts"] + step["dur"]
        inside: dict[str, float] = defaultdict(float)
        while part is not None and part["ts"] < end:
            if part["ts"] >= step["ts"]:
                inside[part["name"]] += part["dur"]
            part = next(parts, None)
        inside["between"] = following["ts"] - end
        for name in PARTS:
            found[name].append(inside[name])
    return Profile(len(steps) - 1, _step_us(steps), {name: median(found[name]) for name in PARTS})


def _step_us(steps: Sequence[Mapping[str, float]]) -> float:
    return median(after["ts"] - before["ts"] for before, after in pairwise(steps))


TOKENS = {"1M": 200, "10M": 100, "60M": 40, "700M": 200, "3B": 200}
"""Of a turn: short ones, for what disturbs the machine comes and goes within seconds."""
OF_BARE = {"1M": 0.88, "10M": 0.95, "60M": 0.95}
"""The least that is to be reached of the faster bare loop."""


class Decoded(NamedTuple):
    """One model: tokens per second of each contender, turn by turn, and where ours spent the time of a token."""

    size: str
    speeds: Mapping[str, Sequence[float]]
    profile: Profile

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
    shares = {part: [100 * model.profile.parts_us[part] / model.profile.step_us for model in models] for part in PARTS}
    groups = [f"{model.size}\nbare loop {median(model.speeds[BARE]):.0f} tok/s" for model in models]
    steps = [f"{model.size}\n{model.profile.step_us / 1e3:.2f} ms" for model in models]
    figures = {
        model.size: {
            "tokens_per_s": model.speeds,
            "of_bare": {name: model.ratio(name, BARE) for name in model.speeds},
            "profile": model.profile._asdict(),
        }
        for model in models
    }
    return Report(
        targets,
        [Table(title, columns, rows), *(model.profile.table(f"{model.size}, ours") for model in models)],
        [
            Bars("decode, one stream, over the bare loop", groups, ratios, digits=2),
            Bars("where a token's time goes, %", steps, shares, stacked=True),
        ],
        {"turns": turns, "models": figures},
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", action="append", choices=SIZES, help="this model only; may be repeated")
    parser.add_argument("--turns", type=int, default=15, metavar="N", help="of each contender (default: %(default)s)")
    parser.add_argument("--drafts", action="store_true", help="what drafts bring instead")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="trace a run of ours there, for Perfetto, and show what a token takes",
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    if arguments.turns < 1:
        raise ValueError("there is at least one turn")
    if arguments.drafts:
        return drafts.run(arguments, say)
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
            **{each: partial(served_speed, one.endpoint) for each, one in served.items()},
            **{each: partial(bare_speed, bare) for each, bare in loops.items()},
        }
        speeds = interleave(contenders, arguments.turns)
    with TemporaryDirectory(prefix="bench-") as folder:
        trace = (arguments.profile or Path(folder)) / f"decode-{name}.json"
        return Decoded(name, speeds, profiled(trace, size, seed, servers(arguments, say)[0], tokens))
