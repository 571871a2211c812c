"""`scripts/bench parallel`: several users of one runner at once, over real processes and real HTTP.

The model is a Llama of random weights, of 11 M parameters by default. The contenders are servers that all run
from the beginning to the end, and rest while another one is measured; they take turns, after one round that does not
count. `ours` runs eight requests at once, `in turn` is the same runner with --parallel 1, `bare loop` is mlx-lm's
model and caches without a server, which only decodes.

decode  all streams start together with short prompts; tokens per second of all of them, after each has got its first
        one, until the first one ends; of streams that never ran all at once, from the very first line to the last
gap     a stream runs; another client sends a long prompt, and gets a short answer: the largest time between two lines
        of the running stream meanwhile, and the newcomer's first token, which is given up after ten seconds
drop    a client sends a long prompt and closes its connection in the middle of the prefill; at that moment another one
        sends a short prompt: the time until its first token
shared  eight prompts with one prefix and suffixes of 16 to 32 tokens come at once: the time until the last one has its
        first token, over that of the same work without any waste: the first prompt alone and cold, plus each of the
        seven others alone, one after another, with the prefix in the cache
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter

from scripts.tools.bench.bare_loop import BareLoop
from scripts.tools.bench.llamas import Prompts
from scripts.tools.bench.report import Report, Rounds, Table, Target, interleave, median_ratio
from scripts.tools.bench.servers import (
    BARE,
    FEW_TOKENS,
    OURS,
    SHORT_TOKENS,
    SIZES,
    Endpoint,
    MismeasuredError,
    answer,
    first_line_s,
    random_model,
    serve,
    servers,
    this_runner,
)

IN_TURN = "in turn"
STREAMS, STREAM_TOKENS = (1, 2, 4, 8), 128
"""The streams that decode at once, and the tokens of each."""
LENGTHS, PREFIX_TOKENS = (500, 2000), 500
"""Tokens of long prompts, and of the prefix that eight prompts share."""
SUFFIXES = tuple(round(16 + 16 * index / 7) for index in range(8))
"""Lengths of the texts after a shared prefix, in tokens."""
PATIENCE_S = 10.0
"""The longest wait of a newcomer beside a running stream."""
_PARALLEL = 8
_LONG_TOKENS = 8192
_WARM_LINES = 16
_DROPPED_AT = 0.4
_CASE_S = 300.0
"""The most that one contender may take for one figure."""
RATIO_TARGET, GAP_TARGET_MS, DROP_TARGET_MS, SHARED_TARGET = 2.5, 300.0, 150.0, 1.3
"""The first is the ratio of the tokens that eight streams decode together to those of one stream."""

DECODE, GAP, NEWCOMER, DROP = ("{} streams".format, "gap {}".format, "newcomer {}".format, "drop {}".format)
"""The names of cases, of a number of streams or of a length."""
SHARED = f"shared {PREFIX_TOKENS}"


def rate(answers: Sequence[Sequence[float]]) -> float:
    """Returns the tokens per second of streams, from the times of their lines: after all have got their first one,
    until the first one ends. Streams that were never all there count from the very first line to the very last."""
    begin, end = max(lines[0] for lines in answers), min(lines[-1] for lines in answers)
    if begin >= end:
        begin, end = min(lines[0] for lines in answers), max(lines[-1] for lines in answers)
    return sum(begin < line <= end for lines in answers for line in lines) / (end - begin)


def largest_gap(lines: Sequence[float], begin: float, end: float) -> float:
    """Returns the largest time between two of the lines; one counts as a whole when a part of it lies between `begin`
    and `end`. Raises ValueError if none does."""
    gaps = [later - earlier for earlier, later in pairwise(lines) if later > begin and earlier < end]
    if not gaps:
        raise ValueError("an answer ended before the other prompt came: it was too short for this machine")
    return max(gaps)


async def decode(endpoint: Endpoint, prompts: Prompts, streams: int) -> float:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(answer(endpoint, prompts.text(SHORT_TOKENS), STREAM_TOKENS)) for _ in range(streams)]
    return rate([task.result().times for task in asked])


async def gap(endpoint: Endpoint, prompts: Prompts, length: int) -> tuple[float, float]:
    """A stream runs, and a prompt of `length` tokens comes. Returns the largest gap and the newcomer's first token, in
    seconds."""
    lines: list[float] = []

    async def run() -> None:
        async with endpoint.stream(prompts.text(SHORT_TOKENS), _LONG_TOKENS) as spoken:
            async for _ in spoken:
                lines.append(perf_counter())  # noqa: PERF401 - others read the list while it grows

    async def until(ready: float, count: int) -> None:
        """A line after the time `ready`, the one with number `count` or a later one."""
        while len(lines) < count or lines[-1] <= ready:
            if running.done():
                await running
                raise MismeasuredError(f"a stream of {_LONG_TOKENS} tokens ended before its time")
            await asyncio.sleep(0.005)

    running = asyncio.create_task(run())
    try:
        await until(0.0, _WARM_LINES)
        begin, newcomer_s = perf_counter(), PATIENCE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                newcomer_s = await first_line_s(endpoint, prompts.text(length))
        end = perf_counter()
        await until(end, 1)
        return largest_gap(lines, begin, end), newcomer_s
    finally:
        running.cancel()
        await asyncio.wait([running])


async def drop(endpoint: Endpoint, prompts: Prompts, length: int) -> float:
    """A prompt of `length` tokens comes, its client leaves, and a short one comes. Returns the seconds to its first
    token."""
    wait_s = _DROPPED_AT * await first_line_s(endpoint, prompts.text(length))
    while await _answers_within(wait_s, endpoint, prompts.text(length)):
        wait_s /= 2  # that prefill was quicker than the one measured
    return await first_line_s(endpoint, prompts.text(SHORT_TOKENS))


async def _answers_within(wait_s: float, endpoint: Endpoint, prompt: str) -> bool:
    """Returns True if the first line comes in that time; if not, the connection is closed."""
    try:
        async with asyncio.timeout(wait_s), endpoint.stream(prompt, FEW_TOKENS) as lines:
            async for _ in lines:
                return True
    except TimeoutError:
        return False
    raise MismeasuredError("an answer had no line")


async def share(endpoint: Endpoint, prompts: Prompts) -> float:
    """Prompts of one prefix: alone, then, with another prefix, together. Returns the time of these over that of
    those."""
    alone, together = (
        [prefix + prompts.text(suffix) for suffix in SUFFIXES]
        for prefix in (prompts.text(PREFIX_TOKENS), prompts.text(PREFIX_TOKENS))
    )
    bound_s = sum([await first_line_s(endpoint, prompt) for prompt in alone])
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(first_line_s(endpoint, prompt)) for prompt in together]
    return max(task.result() for task in asked) / bound_s


async def measure(endpoint: Endpoint, prompts: Prompts) -> Mapping[str, float]:
    """Returns the figures of a server: tokens per second, milliseconds, and a ratio. Raises what clients raise,
    `MismeasuredError` and TimeoutError."""

    @contextlib.asynccontextmanager
    async def alone() -> AsyncIterator[None]:
        async with asyncio.timeout(_CASE_S):
            await answer(endpoint, prompts.text(SHORT_TOKENS), 1)  # what the last one left behind is over
            yield

    found = {}
    for streams in STREAMS:
        async with alone():
            found[DECODE(streams)] = await decode(endpoint, prompts, streams)
    for length in LENGTHS:
        async with alone():
            gap_s, newcomer_s = await gap(endpoint, prompts, length)
            found |= {GAP(length): 1e3 * gap_s, NEWCOMER(length): 1e3 * newcomer_s}
        async with alone():
            found[DROP(length)] = 1e3 * await drop(endpoint, prompts, length)
    async with alone():
        found[SHARED] = await share(endpoint, prompts)
    return found


def report(turns: int, found: Mapping[str, Sequence[Mapping[str, float]]]) -> Report:
    """Returns the results by contender, turn by turn. The gap's target holds for the worst of all turns."""
    rounds, ours = Rounds(found), partial(Rounds(found).of, OURS)
    targets = [Target(f"{SHARED}, over the bound", median(ours(SHARED)), SHARED_TARGET)]
    if {1, 8} <= set(STREAMS):
        ratio = median_ratio(ours(DECODE(8)), ours(DECODE(1)))
        targets.append(Target("decode, 8 streams over 1", ratio, RATIO_TARGET, most=False))
    for length in LENGTHS:
        targets.append(Target(f"{GAP(length)}, worst", max(ours(GAP(length))), GAP_TARGET_MS, unit=" ms"))
        targets.append(Target(DROP(length), median(ours(DROP(length))), DROP_TARGET_MS, unit=" ms"))
    served = Rounds({name: figures for name, figures in found.items() if name != BARE})
    speeds = [*map(DECODE, STREAMS)]
    waits = [case for length in LENGTHS for case in (GAP(length), NEWCOMER(length), DROP(length))]
    ratios = served.rows([SHARED], ".2f")
    tables = [
        Table("tokens/s of all", ("", *speeds), [(name, *cells) for name, cells in rounds.rows(speeds).items()]),
        Table(
            f"ms, and {SHARED} over the bound",
            ("", *waits, SHARED),
            [(name, *cells, *ratios[name]) for name, cells in served.rows(waits, ",.0f").items()],
        ),
    ]
    return Report(targets, tables, {"turns": turns, "contenders": found}, f"Figures are medians of {turns} turns.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", choices=SIZES, default="10M", help="of the model, in parameters (default: %(default)s)"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Runs the benchmark, and reports progress to `say`. Raises ValueError if the options make no sense."""
    size, prompts = SIZES[arguments.size], Prompts(arguments.seed)
    with asyncio.Runner() as loop, ExitStack() as stack:
        contenders = [*servers(arguments, say, _PARALLEL), this_runner(IN_TURN, 1)]
        started = serve(random_model(size, arguments.seed, stack), contenders, stack, loop)
        bare = BareLoop(size, arguments.seed, stack)

        def served(name: str, endpoint: Endpoint) -> Mapping[str, float]:
            say(f"{name} ...")
            return loop.run(measure(endpoint, prompts))

        def looped() -> Mapping[str, float]:
            say(f"{BARE} ...")
            return {
                DECODE(streams): bare.decode([prompts.ids(SHORT_TOKENS) for _ in range(streams)], STREAM_TOKENS)
                for streams in STREAMS
            }

        measured: dict[str, Callable[[], Mapping[str, float]]] = {
            name: partial(served, name, endpoint) for name, endpoint in started.items()
        }
        return report(arguments.turns, interleave({**measured, BARE: looped}, arguments.turns))
