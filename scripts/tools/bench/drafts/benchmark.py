"""`scripts/bench drafts`: what drafts bring where text repeats, and what they cost where it does not.

fresh       nothing in the prompt has to do with the answer
quoted      the answer stands in the prompt
again       a prompt that was answered before
misleading  behind every six tokens of the answer the prompt goes on otherwise, so that every draft is wrong
eight       eight answers at once, which are not drafted

The model says the words of its vocabulary in order, at the price of a Llama of its size. Tokens per second are those of
the client, with `--draft auto` over `--draft off`, turn by turn.
"""

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scripts.tools.bench.common.contenders import SIZES, open_endpoint
from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.report import Report, Table, Target, median_ratio
from scripts.tools.bench.common.requests import answer, ask
from scripts.tools.bench.common.servers import Endpoint, this_runner
from scripts.tools.bench.drafts.chain import WORDS, ChainPrompts, write_chain
from scripts.tools.bench.parallel.clients import Rate

AUTO, OFF = "--draft auto", "--draft off"
CASES: Mapping[str, tuple[float, str]] = {
    "fresh": (0.97, "nothing repeats"),
    "quoted": (2.5, "the answer stands in the prompt"),
    "again": (2.5, "the prompt was answered before"),
    "misleading": (0.97, "every draft is wrong"),
    "eight": (0.98, "eight at once"),
}
"""The least ratio of each case, and its meaning."""
PROMPT_TOKENS, ANSWER_TOKENS, STREAMS = 256, 128, 8


class Measured(NamedTuple):
    """One model: tokens per second of each contender by case, turn by turn."""

    size: str
    speeds: Mapping[str, Mapping[str, Sequence[float]]]

    def ratio(self, case: str) -> float:
        """The median of a turn's ratios."""
        return median_ratio(self.speeds[case][AUTO], self.speeds[case][OFF])


@dataclass(frozen=True)
class DraftsReport(Report):
    """All of it."""

    turns: int
    models: Sequence[Measured]

    @property
    def targets(self) -> list[Target]:
        """Never slower, and much faster where all repeats."""
        return [
            Target(f"{model.size}, {case}: {meaning}", model.ratio(case), least, most=False)
            for model in self.models
            for case, (least, meaning) in CASES.items()
        ]

    @property
    def tables(self) -> Sequence[Table]:
        """A row for each model and case."""
        rows = [
            (
                f"{model.size}, {case}",
                *(f"{median(model.speeds[case][name]):.1f}" for name in (AUTO, OFF)),
                f"{model.ratio(case):.2f}",
            )
            for model in self.models
            for case in CASES
        ]
        return [Table(f"tokens/s: medians of {self.turns} turns", ("", AUTO, OFF, "ratio"), rows)]

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {"turns": self.turns, "models": {model.size: model.speeds for model in self.models}}

    @property
    def charts(self) -> Sequence[Chart]:
        """The ratios."""
        ratios = {model.size: [model.ratio(case) for case in CASES] for model in self.models}
        return [Bars("tokens/s with drafts over those without", [*CASES], ratios, digits=2, target=1.0)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument("--size", action="append", choices=SIZES, help="this model only; may be repeated")
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="of each contender (default: %(default)s)")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> DraftsReport:
    """The whole benchmark. ValueError when the options make no sense."""
    if not 0 < arguments.turns < WORDS // 2 // (ANSWER_TOKENS + 1):
        raise ValueError("there is at least one turn, and there are not more than there are words for")
    models = []
    for size in arguments.size or ("10M", "60M"):
        say(f"{size} ...")
        models.append(_measure(size, arguments))
    return DraftsReport(arguments.turns, models)


def _measure(size: str, arguments: argparse.Namespace) -> Measured:
    with asyncio.Runner() as loop, ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
        write_chain(directory, SIZES[size], arguments.seed)
        endpoints = {}
        for name in (AUTO, OFF):
            server = this_runner(name, STREAMS, blas=arguments.blas, blas_threads=arguments.blas_threads)
            server.environment["MLX_RUNNER_DRAFT"] = name.split()[-1]
            endpoints[name] = open_endpoint(server, server.start(directory, stack), directory, stack, loop)
        speeds = {}
        for case in CASES:
            # Both contenders get the same prompts. Nobody has heard the answers that are to be new.
            start = WORDS // 2 if case == "misleading" else 0
            prompts = {name: ChainPrompts(arguments.seed, start) for name in endpoints}

            def speed(name: str, case: str = case, prompts: Mapping[str, ChainPrompts] = prompts) -> float:
                return loop.run(measure(endpoints[name], case, prompts[name]))

            speeds[case] = interleave({name: partial(speed, name) for name in endpoints}, arguments.turns)
        return Measured(size, speeds)


async def measure(endpoint: Endpoint, case: str, prompts: ChainPrompts) -> float:
    """Tokens per second of one answer, or of several together, after their first."""
    if case == "eight":
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(ask(endpoint, prompts.quoted(PROMPT_TOKENS, 8), ANSWER_TOKENS))
                for _ in range(STREAMS)
            ]
        return Rate.of([task.result() for task in asked]).tokens_per_s
    if case == "misleading":
        prompt = prompts.misleading(ANSWER_TOKENS)
    else:
        prompt = (prompts.quoted if case == "quoted" else prompts.fresh)(PROMPT_TOKENS, ANSWER_TOKENS)
    if case == "again":
        await ask(endpoint, prompt, ANSWER_TOKENS)
    return (await answer(endpoint, prompt, ANSWER_TOKENS)).tokens_per_s
