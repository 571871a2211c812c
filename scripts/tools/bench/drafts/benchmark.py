"""`scripts/bench drafts`: what drafts bring where text repeats, and what they cost where it does not.

fresh       nothing in the prompt has to do with the answer
quoted      the answer stands in the prompt
again       a prompt that was answered before
misleading  behind every six tokens of the answer the prompt goes on otherwise, so that every draft is wrong
eight       eight answers at once, which are not drafted

Then the times between the tokens of an answer in which nothing repeats, beside one that repeats its prompt.

Then a small draft model that is always right, and one that is always wrong, each beside the same model without one,
where nothing repeats.

With --real, tasks for a trained model too, SmolLM2-135M-Instruct in 4 bits (93 MB are fetched once): `edit` code twice,
`quote` a passage, list `records` as JSON of a schema, `calls` of tools one after the other, and `story`, a free text.

The other models say the words of their vocabulary in order, at the price of a Llama of their size. Tokens per second
are those of the client, with `--draft auto` over `--draft off`, or with a draft model over without, turn by turn.
"""

import argparse
import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

from scripts.tools.bench.common.contenders import SIZES, open_endpoint
from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.gaps import Gaps
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.report import Report, Table, Target, median_ratio
from scripts.tools.bench.common.requests import MismeasuredError, answer, ask
from scripts.tools.bench.common.servers import Endpoint, RunnerEndpoint, Server, this_runner
from scripts.tools.bench.drafts.chain import ANSWER_TOKENS, PROMPT_TOKENS, WORDS, ChainPrompts, write_chain
from scripts.tools.bench.drafts.gaps import measure_gaps
from scripts.tools.bench.drafts.models import DraftModels, measure_models, table
from scripts.tools.bench.drafts.tasks import TASKS, Done, hold
from scripts.tools.real.fetch import FetchError
from scripts.tools.real.main import make_model

AUTO, OFF = "--draft auto", "--draft off"
CASES: Mapping[str, tuple[float, str]] = {
    "fresh": (0.97, "nothing repeats"),
    "quoted": (2.5, "the answer stands in the prompt"),
    "again": (2.5, "the prompt was answered before"),
    "misleading": (0.97, "every draft is wrong"),
    "eight": (0.98, "eight at once"),
}
"""The least ratio of each case, and its meaning."""
LEAST = {"story": 0.97, "calls": 1.0, "records": 1.0, "quote": 1.0, "edit": 1.0}
"""The least ratio of each task."""
STREAMS, SHORT_TOKENS = 8, 16


class Measured(NamedTuple):
    """One model: tokens per second of each contender by case, turn by turn."""

    size: str
    speeds: Mapping[str, Mapping[str, Sequence[float]]]

    def ratio(self, case: str) -> float:
        """The median of a turn's ratios."""
        return median_ratio(self.speeds[case][AUTO], self.speeds[case][OFF])


@dataclass(frozen=True)
class DraftsReport(Report):
    """All of it. `tasks` are the sessions of the trained model by task and contender, turn by turn."""

    turns: int
    models: Sequence[Measured]
    tasks: Mapping[str, Mapping[str, Sequence[Done]]]
    draft_models: Sequence[DraftModels]
    gaps: Mapping[str, Gaps]
    """By size."""

    @property
    def targets(self) -> list[Target]:
        """Never slower, and much faster where all repeats."""
        known = [
            Target(f"{model.size}, {case}: {meaning}", model.ratio(case), least, most=False)
            for model in self.models
            for case, (least, meaning) in CASES.items()
        ]
        drafted = [target for each in self.draft_models for target in each.targets]
        gaps = [
            target
            for size, each in self.gaps.items()
            for target in each.targets(
                f"{size}, time between tokens beside a drafted answer", f"{size}, longest time between tokens, added"
            )
        ]
        tasks = [
            Target(f"trained model, {task}", self._task_ratio(task), least, most=False)
            for task, least in LEAST.items()
            if task in self.tasks
        ]
        return [*known, *gaps, *drafted, *tasks]

    def _task_ratio(self, task: str) -> float:
        return median_ratio(*([done.tokens_per_s for done in self.tasks[task][name]] for name in (AUTO, OFF)))

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
        tables = [
            Table(f"tokens/s: medians of {self.turns} turns", ("", AUTO, OFF, "ratio"), rows),
            Table(
                "ms between the tokens of an answer beside another that repeats",
                ("", AUTO, OFF, "ratio"),
                [row for size, each in self.gaps.items() for row in each.rows(f"{size}, ")],
            ),
            table(self.draft_models),
        ]
        if self.tasks:
            done = [
                (
                    task,
                    *(f"{median(one.tokens_per_s for one in found[name]):.1f}" for name in (AUTO, OFF)),
                    f"{self._task_ratio(task):.2f}",
                    f"{median(one.tokens_per_forward for one in found[AUTO]):.2f}",
                )
                for task, found in self.tasks.items()
            ]
            tables.append(Table("a trained model, tokens/s", ("", AUTO, OFF, "ratio", "tokens a forward"), done))
        return tables

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        tasks = {
            task: {name: [done._asdict() for done in found] for name, found in by_name.items()}
            for task, by_name in self.tasks.items()
        }
        return {
            "turns": self.turns,
            "models": {model.size: model.speeds for model in self.models},
            "gaps": {size: each._asdict() for size, each in self.gaps.items()},
            "draft_models": {each.size: each.data() for each in self.draft_models},
            "tasks": tasks,
        }

    @property
    def charts(self) -> Sequence[Chart]:
        """The ratios."""
        ratios = {model.size: [model.ratio(case) for case in CASES] for model in self.models}
        return [Bars("tokens/s with drafts over those without", [*CASES], ratios, digits=2, target=1.0)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument("--size", action="append", choices=SIZES, help="this model only; may be repeated")
    parser.add_argument("--real", action="store_true", help="tasks for a trained model, too")
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="of each contender (default: %(default)s)")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> DraftsReport:
    """The whole benchmark. ValueError when the options make no sense."""
    if not 0 < arguments.turns < WORDS // 2 // (ANSWER_TOKENS + 1):
        raise ValueError("there is at least one turn, and there are not more than there are words for")
    models, draft_models, gaps = [], [], dict[str, Gaps]()
    for size in arguments.size or ("10M", "60M"):
        say(f"{size} ...")
        models.append(_measure(size, arguments))
        say(f"{size}, beside another answer ...")
        gaps[size] = measure_gaps(size, arguments, *_contenders(arguments))
        say(f"{size}, draft models ...")
        draft_models.append(measure_models(size, arguments))
    tasks = _perform(arguments, say) if arguments.real else {}
    return DraftsReport(arguments.turns, models, tasks, draft_models, gaps)


def _contenders(arguments: argparse.Namespace) -> Iterator[Server]:
    for name in (AUTO, OFF):
        server = this_runner(name, STREAMS, blas=arguments.blas, blas_threads=arguments.blas_threads)
        server.environment["MLX_RUNNER_DRAFT"] = name.split()[-1]
        yield server


def _perform(arguments: argparse.Namespace, say: Callable[[str], None]) -> Mapping[str, Mapping[str, Sequence[Done]]]:
    try:
        model = make_model()
    except FetchError as error:
        raise ValueError(str(error)) from error
    with asyncio.Runner() as loop, ExitStack() as stack:
        clients = {}
        for server in _contenders(arguments):
            endpoint = open_endpoint(server, server.start(model, stack), model, stack, loop)
            assert isinstance(endpoint, RunnerEndpoint)
            clients[server.name] = endpoint.client
        done = {}
        for task in TASKS:
            say(f"{task} ...")
            turns = {name: count(arguments.seed) for name in clients}

            def perform(name: str, task: str = task, turns: Mapping[str, Iterator[int]] = turns) -> Done:
                return loop.run(hold(clients[name], task, next(turns[name])))

            done[task] = interleave({name: partial(perform, name) for name in clients}, arguments.turns)
            if any(one.texts != other.texts for one, other in zip(*done[task].values(), strict=True)):
                raise MismeasuredError(f"{task}: another answer with drafts than without")
        return done


def _measure(size: str, arguments: argparse.Namespace) -> Measured:
    with asyncio.Runner() as loop, ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
        write_chain(directory, SIZES[size], arguments.seed)
        endpoints = {}
        for server in _contenders(arguments):
            endpoints[server.name] = open_endpoint(server, server.start(directory, stack), directory, stack, loop)
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
    """Tokens per second of one answer after its first, or of several from the question to their last."""
    if case == "eight":
        started = perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(ask(endpoint, prompts.quoted(SHORT_TOKENS, 8), ANSWER_TOKENS))
        return STREAMS * ANSWER_TOKENS / (perf_counter() - started)
    if case == "misleading":
        prompt = prompts.misleading(ANSWER_TOKENS)
    else:
        prompt = (prompts.quoted if case == "quoted" else prompts.fresh)(PROMPT_TOKENS, ANSWER_TOKENS)
    if case == "again":
        await ask(endpoint, prompt, ANSWER_TOKENS)
    return (await answer(endpoint, prompt, ANSWER_TOKENS)).tokens_per_s
