"""The times between the tokens of an answer while another is written that could be drafted."""

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scripts.tools.bench.common.contenders import SIZES, open_endpoint
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.report import Table, Target, median_ratio
from scripts.tools.bench.common.requests import MismeasuredError, answer, ask
from scripts.tools.bench.common.servers import Endpoint, Server
from scripts.tools.bench.drafts.chain import ANSWER_TOKENS, PROMPT_TOKENS, ChainPrompts, write_chain

RATIO, LONGER_MS = 1.03, 2.0
"""The bounds of the median over that without drafts, and of what is added to the longest."""
_WATCHED_TOKENS = 2 * ANSWER_TOKENS


class Gaps(NamedTuple):
    """One model: the times in ms of the runner with drafts and of the one without, turn by turn."""

    size: str
    drafting: Sequence[Sequence[float]]
    plain: Sequence[Sequence[float]]

    def ratio(self, of: Callable[[Sequence[float]], float]) -> float:
        """The median of a turn's ratios of, for instance, the longest times."""
        return median_ratio(*([of(turn) for turn in turns] for turns in (self.drafting, self.plain)))

    @property
    def targets(self) -> list[Target]:
        """As without drafts."""
        longer_ms = median(max(one) - max(other) for one, other in zip(self.drafting, self.plain, strict=True))
        return [
            Target(f"{self.size}, time between tokens beside a drafted answer", self.ratio(median), RATIO),
            Target(f"{self.size}, longest time between tokens, added", longer_ms, LONGER_MS, unit="ms"),
        ]

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {"drafting_ms": self.drafting, "plain_ms": self.plain}


def table(found: Sequence[Gaps], names: tuple[str, str]) -> Table:
    """A row for the medians of each model, and one for the longest."""

    def row(each: Gaps, what: str, of: Callable[[Sequence[float]], float]) -> Sequence[str]:
        ms = (f"{median(of(turn) for turn in turns):.2f}" for turns in (each.drafting, each.plain))
        return (f"{each.size}, {what}", *ms, f"{each.ratio(of):.3f}")

    rows = [line for each in found for line in (row(each, "median", median), row(each, "longest", max))]
    return Table("ms between the tokens of an answer beside another that repeats", ("", *names, "ratio"), rows)


def measure_gaps(size: str, arguments: argparse.Namespace, drafting: Server, plain: Server) -> Gaps:
    """Starts both runners, and watches answers in which nothing repeats."""
    with asyncio.Runner() as loop, ExitStack() as stack:
        model = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
        write_chain(model, SIZES[size], arguments.seed)
        watched = {}
        for server in (drafting, plain):
            endpoint = open_endpoint(server, server.start(model, stack), model, stack, loop)
            watched[server.name] = partial(_watch, loop, endpoint, ChainPrompts(arguments.seed))
        found = interleave(watched, arguments.turns)
    return Gaps(size, found[drafting.name], found[plain.name])


def _watch(loop: asyncio.Runner, endpoint: Endpoint, prompts: ChainPrompts) -> list[float]:
    async def both() -> list[float]:
        watched, (began, *_, ended) = await asyncio.gather(
            answer(endpoint, prompts.fresh(PROMPT_TOKENS, _WATCHED_TOKENS), _WATCHED_TOKENS),
            ask(endpoint, prompts.quoted(PROMPT_TOKENS, ANSWER_TOKENS), ANSWER_TOKENS),
        )
        if watched.times[-1] < ended:
            raise MismeasuredError("the answer ended before the one beside it")
        beside = [time for time in watched.times if began <= time <= ended]
        return [1e3 * (after - before) for before, after in pairwise(beside)]

    return loop.run(both())
