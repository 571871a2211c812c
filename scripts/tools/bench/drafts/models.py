"""A draft model that is always right, and one that is always wrong, beside the same model without one."""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scripts.tools.bench.common.contenders import SIZES, open_endpoint
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.report import Table, Target, median_ratio
from scripts.tools.bench.common.requests import Answered, MismeasuredError, answer
from scripts.tools.bench.common.servers import Endpoint, RunnerEndpoint, this_runner
from scripts.tools.bench.drafts.chain import ANSWER_TOKENS, PROMPT_TOKENS, ChainPrompts, write_chain
from scripts.tools.bench.drafts.tasks import draft_counts
from scripts.tools.bench.llamas import M1

NONE, RIGHT, WRONG = "no draft model", "always right", "always wrong"
LEAST: Mapping[str, float] = {RIGHT: 1.2, WRONG: 0.97}
"""The least ratio of each draft model to none."""
_STEPS = {RIGHT: 1, WRONG: 2}


class DraftModels(NamedTuple):
    """One large model: tokens per second with each draft model, turn by turn, and how many tokens it drafted."""

    size: str
    speeds: Mapping[str, Sequence[float]]
    drafted: Mapping[str, int]

    def ratio(self, name: str) -> float:
        """The median of a turn's ratios."""
        return median_ratio(self.speeds[name], self.speeds[NONE])

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {"tokens_per_s": self.speeds, "drafted": self.drafted}

    @property
    def targets(self) -> list[Target]:
        """Never slower, and faster if the drafts are right."""
        return [
            Target(f"{self.size}, a draft model that is {name}", self.ratio(name), least, most=False)
            for name, least in LEAST.items()
        ]


def table(found: Sequence[DraftModels]) -> Table:
    """A row for each large model, and each draft model."""
    rows = [
        (
            f"{each.size}, {name}",
            *(f"{median(each.speeds[one]):.1f}" for one in (name, NONE)),
            f"{each.ratio(name):.2f}",
            str(each.drafted[name]),
        )
        for each in found
        for name in LEAST
    ]
    return Table(
        "draft models, tokens/s where nothing repeats", ("", "with it", "without", "ratio", "tokens drafted"), rows
    )


def _ask(loop: asyncio.Runner, endpoint: Endpoint, prompts: ChainPrompts) -> Answered:
    return loop.run(answer(endpoint, prompts.fresh(PROMPT_TOKENS, ANSWER_TOKENS), ANSWER_TOKENS))


def measure_models(size: str, arguments: argparse.Namespace) -> DraftModels:
    """Measures answers to prompts in which nothing repeats. Raises MismeasuredError if a draft model changes one, or
    is not as right as it should be."""
    with asyncio.Runner() as loop, ExitStack() as stack:

        def directory() -> Path:
            return Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))

        target = directory()
        write_chain(target, SIZES[size], arguments.seed)
        wishes = {NONE: "auto"}
        for name, step in _STEPS.items():
            draft = directory()
            write_chain(draft, M1, arguments.seed, step)
            wishes[name] = str(draft)
        asked, clients = {}, {}
        for name, wish in wishes.items():
            server = this_runner(name, 1, blas=arguments.blas, blas_threads=arguments.blas_threads)
            server.environment["MLX_RUNNER_DRAFT"] = wish
            endpoint = open_endpoint(server, server.start(target, stack), target, stack, loop)
            assert isinstance(endpoint, RunnerEndpoint)
            clients[name] = endpoint.client
            asked[name] = partial(_ask, loop, endpoint, ChainPrompts(arguments.seed))
        found = interleave(asked, arguments.turns)
        counts = {name: loop.run(draft_counts(clients[name])) for name in LEAST}
    for name, told in counts.items():
        if told.accepted["model"] != (told.drafted["model"] if name == RIGHT else 0):
            raise MismeasuredError(f"a draft model that is {name} was right {told.accepted['model']} times")
    if any(len({one.text for one in turn}) > 1 for turn in zip(*found.values(), strict=True)):
        raise MismeasuredError("another answer with a draft model than without")
    speeds = {name: [one.tokens_per_s for one in each] for name, each in found.items()}
    return DraftModels(size, speeds, {name: told.drafted["model"] for name, told in counts.items()})
