"""`scripts/bench disk`: the first token of a conversation after its process was killed (`--disk-cache`).

cold     a prompt of so many tokens that nobody has seen
memory   its answer and 32 tokens more, while another conversation has the layers: from the cache in memory
disk     another 32 tokens behind the same answer, in a process that was started after a SIGKILL

Every turn makes a new conversation in a new directory. `computed` are the tokens of the prompt that were not reused.
Then one answer goes on while the prompt of another, which has just ended, is written: `gaps` are the times between its
next tokens, in a process that writes and in one that does not.
"""

import argparse
import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from protocol.stats import Stats
from scripts.tools.bench.common.contenders import OURS, SIZES, open_endpoint
from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.gaps import Gaps
from scripts.tools.bench.common.report import Report, Table, Target, median_ratio
from scripts.tools.bench.common.requests import FEW_TOKENS, MismeasuredError, answer
from scripts.tools.bench.common.servers import RunnerEndpoint, Server, this_runner
from scripts.tools.bench.llamas import Prompts, make_model, write_model

ANSWER_TOKENS, APPENDED_TOKENS, OTHER_TOKENS = 16, 32, 300
RUNNING_TOKENS, WATCHED_GAPS, BESIDE_TOKENS = 400, 32, 2000
CASES = ("cold", "memory", "disk")
WRITING, PLAIN = "writing", "not writing"
MEMORY_RATIO, COPY_SHARE = 1.5, 0.01
COLD_RATIOS = {"10M": 20.0, "60M": 12.0}
_POLL_S = 0.05


class Times(NamedTuple):
    """Of one turn."""

    ms: Mapping[str, float]
    computed: Mapping[str, int]
    copy_share: float
    """The engine's time for writing, over that of the prefill."""
    gaps: Mapping[str, Sequence[float]]
    """Between the tokens of a running answer, in ms, with and without a disk cache."""


@dataclass(frozen=True)
class DiskReport(Report):
    """All of it, turn by turn."""

    size: str
    tokens: int
    found: Sequence[Times]

    def ms(self, case: str) -> float:
        """The median."""
        return median(times.ms[case] for times in self.found)

    def ratio(self, case: str, other: str) -> float:
        """The median of a turn's ratios."""
        return median_ratio(*([times.ms[each] for times in self.found] for each in (case, other)))

    @property
    def gaps(self) -> Gaps:
        """Those of all turns."""
        return Gaps(*([times.gaps[case] for times in self.found] for case in (WRITING, PLAIN)))

    @property
    def targets(self) -> list[Target]:
        new = max(times.computed["disk"] for times in self.found)
        found = [
            Target("first token, disk over memory", self.ratio("disk", "memory"), MEMORY_RATIO),
            Target("tokens computed after a restart", new, APPENDED_TOKENS + 1),
            Target("engine time to write over prefill", median(times.copy_share for times in self.found), COPY_SHARE),
            *self.gaps.targets(
                "time between tokens, writing over not", "longest time between tokens, added by writing"
            ),
        ]
        if self.size in COLD_RATIOS:
            bound = COLD_RATIOS[self.size]
            found.append(Target("first token, cold over disk", self.ratio("cold", "disk"), bound, most=False))
        return found

    @property
    def tables(self) -> Sequence[Table]:
        rows = [(case, f"{self.ms(case):,.1f}", str(self.found[-1].computed[case])) for case in CASES]
        title = f"time to the first token: {self.tokens} tokens, {self.size} parameters, {len(self.found)} turns"
        return [
            Table(title, ("", "ms", "tokens computed"), rows),
            Table("time between the tokens of another answer", ("", WRITING, PLAIN, "ratio"), self.gaps.rows()),
        ]

    @property
    def charts(self) -> Sequence[Chart]:
        return [Bars("time to the first token, ms", CASES, {OURS: [self.ms(case) for case in CASES]}, digits=1)]

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {"size": self.size, "tokens": self.tokens, "turns": [times._asdict() for times in self.found]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument("--size", choices=SIZES, default="10M", help="of the model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2000, metavar="N", help="of the prompt (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="(default: %(default)s)")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> DiskReport:
    """The whole benchmark. ValueError when the options make no sense."""
    if arguments.turns < 1 or arguments.tokens < OTHER_TOKENS:
        raise ValueError(f"there is at least one turn, of at least {OTHER_TOKENS} tokens")
    prompts, size, found = Prompts(arguments.seed), SIZES[arguments.size], []
    with asyncio.Runner() as loop, TemporaryDirectory(prefix="bench-") as directory:
        model, kept = Path(directory) / "model", Path(directory) / "kept"
        model.mkdir()
        write_model(model, make_model(size, arguments.seed), size)
        server = this_runner(OURS, 1, blas=arguments.blas, blas_threads=arguments.blas_threads)
        server.environment["MLX_RUNNER_DISK_CACHE"] = str(kept)
        for turn in range(arguments.turns):
            say(f"turn {turn + 1} ...")
            times = _turn(server, model, loop, prompts, arguments.tokens)
            cases = (WRITING, PLAIN) if turn % 2 else (PLAIN, WRITING)
            gaps = {}
            for case in cases:
                beside = this_runner(OURS, 2, blas=arguments.blas, blas_threads=arguments.blas_threads)
                beside.environment["MLX_RUNNER_DRAFT"] = "off"  # drafts come in bursts
                if case == WRITING:
                    beside.environment["MLX_RUNNER_DISK_CACHE"] = str(kept)
                gaps[case] = _gaps(beside, model, loop, prompts, min(arguments.tokens, BESIDE_TOKENS))
            found.append(times._replace(gaps=gaps))
            shutil.rmtree(kept)
    return DiskReport(arguments.size, arguments.tokens, found)


def _turn(server: Server, model: Path, loop: asyncio.Runner, prompts: Prompts, tokens: int) -> Times:
    ms, computed = dict[str, float](), dict[str, int]()

    async def first(endpoint: RunnerEndpoint, case: str, prompt: str, length: int) -> str:
        answered = await answer(endpoint, prompt, length)
        ms[case], computed[case] = 1e3 * answered.first_s, endpoint.prompt_tokens - (endpoint.cached or 0)
        return answered.text

    async def converse(endpoint: RunnerEndpoint) -> tuple[str, Stats]:
        prompt = prompts.text(tokens)
        talk = prompt + await first(endpoint, "cold", prompt, ANSWER_TOKENS)
        await answer(endpoint, prompts.text(OTHER_TOKENS), FEW_TOKENS)
        await first(endpoint, "memory", talk + prompts.text(APPENDED_TOKENS), FEW_TOKENS)
        while (stats := await _stats(endpoint)).disk.pending_tokens or not stats.disk.segments:
            await asyncio.sleep(_POLL_S)
        return talk, stats

    async def warm(endpoint: RunnerEndpoint) -> None:
        await answer(endpoint, prompts.text(OTHER_TOKENS), FEW_TOKENS)

    with ExitStack() as stack:
        endpoint, kill = _start(server, model, stack, loop)
        loop.run(warm(endpoint))
        talk, stats = loop.run(converse(endpoint))
        kill()
        endpoint, _ = _start(server, model, stack, loop)
        loop.run(warm(endpoint))
        loop.run(first(endpoint, "disk", talk + prompts.text(APPENDED_TOKENS), FEW_TOKENS))
    return Times(ms, computed, stats.disk.copy_s / stats.slices.prefill_s, {})


def _gaps(server: Server, model: Path, loop: asyncio.Runner, prompts: Prompts, tokens: int) -> list[float]:
    """Returns the times between the tokens of a running answer, in ms, from the end of another request on."""

    async def other(endpoint: RunnerEndpoint) -> float:
        return (await answer(endpoint, prompts.text(tokens), FEW_TOKENS)).times[-1]

    async def both(endpoint: RunnerEndpoint) -> list[float]:
        await answer(endpoint, prompts.text(OTHER_TOKENS), FEW_TOKENS)
        running = answer(endpoint, prompts.text(OTHER_TOKENS), RUNNING_TOKENS)
        (_, times, _), ended = await asyncio.gather(running, other(endpoint))
        later = [time for time in times if time > ended][: WATCHED_GAPS + 1]
        if len(later) <= WATCHED_GAPS:
            raise MismeasuredError("the answer ended before the prompt beside it was read")
        return [1e3 * (after - before) for before, after in pairwise(later)]

    with ExitStack() as stack:
        endpoint, _ = _start(server, model, stack, loop)
        return loop.run(both(endpoint))


def _start(
    server: Server, model: Path, stack: ExitStack, loop: asyncio.Runner
) -> tuple[RunnerEndpoint, Callable[[], None]]:
    process = server.start(model, stack)
    endpoint = open_endpoint(server, process, model, stack, loop)
    assert isinstance(endpoint, RunnerEndpoint)
    return endpoint, process.kill


async def _stats(endpoint: RunnerEndpoint) -> Stats:
    return msgspec.json.decode((await endpoint.client.send("GET", "/v1/stats")).body, type=Stats)
