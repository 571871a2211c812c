"""`scripts/bench parallel`: several users of one runner at once, over real processes and real HTTP.

The model is a Llama of random weights (11 M parameters). The contenders are servers that all run
from the beginning to the end, and rest while another one is measured; they take turns, after one round that does not
count. `ours` runs several requests at once, `in-turn` is the same runner with --parallel 1, `bare-loop` is mlx-lm's
model and caches without a server, which only decodes.

decode  all streams start together with short prompts; tokens per second of all of them, after each has got its first
        one, until the first one ends
gap     a stream runs; another client sends a long prompt, and gets a short answer; the time between two lines of the
        running stream meanwhile
drop    a client sends a long prompt and closes its connection in the middle of the prefill; at that moment another one
        sends a short prompt: the time until its first token
shared  eight prompts with one prefix and suffixes of 16 to 32 tokens come at once: the time until the last one has its
        first token, over that of the same work without any waste: the first prompt alone and cold, plus each of the
        seven others alone, one after another, with the prefix in the cache
"""

import argparse
import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import NamedTuple

from scripts.tools.bench.bare_loop import BareLoop
from scripts.tools.bench.llamas import M10, Prompts
from scripts.tools.bench.options import names_of, numbers
from scripts.tools.bench.report import Report, Table, Target, interleave, median_ratio
from scripts.tools.bench.servers import (
    FEW_TOKENS,
    SHORT_TOKENS,
    Endpoint,
    MismeasuredError,
    Server,
    ask,
    first_line_s,
    known_mlx_lm,
    other_runner,
    serve,
    this_runner,
)

SUFFIXES = tuple(round(16 + 16 * index / 7) for index in range(8))
"""Lengths of what follows a shared prefix, in tokens."""
PATIENCE_S = 10.0
"""How long a newcomer waits beside a running stream."""
_LONG_TOKENS = 8192
_WARM_LINES = 16
_DROPPED_AT = 0.4


class Rate(NamedTuple):
    """The speed of several streams. `together` is True if they all ran at once, and then only that time counts."""

    tokens_per_s: float
    together: bool

    @classmethod
    def of(cls, answers: Sequence[Sequence[float]]) -> "Rate":
        """From the times of their lines: after all have got their first one, until the first one ends. Streams that
        were never all there at once count from the very first line to the very last."""
        begin, end = max(lines[0] for lines in answers), min(lines[-1] for lines in answers)
        together = begin < end
        if not together:
            begin, end = min(lines[0] for lines in answers), max(lines[-1] for lines in answers)
        counted = sum(begin < line <= end for lines in answers for line in lines)
        return cls(counted / (end - begin), together)


class Gaps(NamedTuple):
    """Between two lines of a running stream, while one prompt was read and answered.

    `newcomer_s` is the time of that prompt's first token; None when it did not come in time.
    """

    largest_s: float
    median_s: float
    newcomer_s: float | None

    @classmethod
    def of(cls, lines: Sequence[float], begin: float, end: float, newcomer_s: float | None) -> "Gaps":
        """`lines` are the times of the running stream, the last of them after `end`; a gap counts as a whole when a
        part of it lies between `begin` and `end`."""
        gaps = [later - earlier for earlier, later in pairwise(lines) if later > begin and earlier < end]
        return cls(max(gaps), median(gaps), newcomer_s)


class Dropped(NamedTuple):
    """A prompt whose client left in the middle of its prefill: the whole prefill's time when nobody leaves, the first
    token of a short request on the idle server, and that of one that comes the moment the client leaves."""

    cold_s: float
    idle_s: float
    after_s: float


class Shared(NamedTuple):
    """Prompts with one prefix. `cold_s`: the first of them alone, nothing known; `warm_s`: each other alone, after it,
    summed; `together_s`: as many that came at once, nothing known, until the last had its first token."""

    cold_s: float
    warm_s: float
    together_s: float

    @property
    def ratio(self) -> float:
        """1 is the time that no sharing can beat: the prefix and all suffixes, each computed once and alone."""
        return self.together_s / (self.cold_s + self.warm_s)


async def decode(endpoint: Endpoint, prompts: Prompts, streams: int, tokens: int) -> Rate:
    """So many streams of so many tokens at once."""
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(endpoint, prompts.text(SHORT_TOKENS), tokens)) for _ in range(streams)]
    return Rate.of([task.result() for task in asked])


async def gaps(endpoint: Endpoint, prompts: Prompts, length: int) -> Gaps:
    """A stream runs, and a prompt of `length` tokens comes."""
    lines: list[float] = []

    async def run() -> None:
        async with endpoint.stream(prompts.text(SHORT_TOKENS), _LONG_TOKENS) as answer:
            async for _ in answer:
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
        begin, newcomer_s = perf_counter(), None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                newcomer_s = await first_line_s(endpoint, prompts.text(length))
        end = perf_counter()
        await until(end, 1)
        return Gaps.of(lines, begin, end, newcomer_s)
    finally:
        running.cancel()
        await asyncio.wait([running])


async def drop(endpoint: Endpoint, prompts: Prompts, length: int) -> Dropped:
    """A prompt of `length` tokens comes, its client leaves, and a short one comes."""
    cold_s = await first_line_s(endpoint, prompts.text(length))
    idle_s = await first_line_s(endpoint, prompts.text(SHORT_TOKENS))
    wait_s = _DROPPED_AT * cold_s
    while await _answers_within(wait_s, endpoint, prompts.text(length)):
        wait_s /= 2  # that prefill was quicker than the one measured
    return Dropped(cold_s, idle_s, await first_line_s(endpoint, prompts.text(SHORT_TOKENS)))


async def _answers_within(wait_s: float, endpoint: Endpoint, prompt: str) -> bool:
    """Returns True if the first line comes in that time; if not, the connection is closed."""
    try:
        async with asyncio.timeout(wait_s), endpoint.stream(prompt, FEW_TOKENS) as lines:
            async for _ in lines:
                return True
    except TimeoutError:
        return False
    raise MismeasuredError("an answer had no line")


async def share(endpoint: Endpoint, prompts: Prompts, length: int) -> Shared:
    """Prompts of one prefix of `length` tokens: alone, then, with another prefix, together."""
    alone = _with_suffixes(prompts, length)
    cold_s = await first_line_s(endpoint, alone[0])
    warm_s = sum([await first_line_s(endpoint, prompt) for prompt in alone[1:]])
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(first_line_s(endpoint, prompt)) for prompt in _with_suffixes(prompts, length)]
    return Shared(cold_s, warm_s, max(task.result() for task in asked))


def _with_suffixes(prompts: Prompts, length: int) -> list[str]:
    prefix = prompts.text(length)
    return [prefix + prompts.text(suffix) for suffix in SUFFIXES]


Cell = tuple[str, int]
"""A measurement, with its number of streams, or the number of tokens of its prompt or prefix."""
Figure = Rate | Gaps | Dropped | Shared
OURS, IN_TURN, MLX_LM, BARE = "ours", "in-turn", "mlx_lm.server", "bare-loop"

RATIO_TARGET = 2.5
"""Of what 8 streams decode together to what one decodes."""
GAP_TARGET_MS = 300.0
DROP_TARGET_MS = 150.0
SHARED_TARGET = 1.3
_TARGET_STREAMS = (1, 8)

_NOTE = f"""Figures are medians over the turns, except where they say worst; targets hold for the median of a turn's
ratio, the median of drop, and the worst gap of all turns.
*           the streams never ran all at once: all their tokens, from the very first line to the very last
newcomer    until the first token of the prompt that came; -: not within {PATIENCE_S:.0f} s, so it was given up
bound       the first prompt alone and cold, plus each of the {len(SUFFIXES) - 1} others alone with a known prefix"""
_TABLES: Mapping[str, tuple[str, Sequence[str]]] = {
    "decode": ("decode", ("streams", "tokens/s of all")),
    "gap": (
        "gap: between two lines of a running stream while a prompt comes, ms",
        ("prompt", "largest", "worst", "median", "newcomer"),
    ),
    "drop": (
        "drop: first token of a short prompt the moment another client leaves in its prefill, ms",
        ("prompt", "its prefill", "short, idle", "short, drop", "worst"),
    ),
    "shared": (
        f"shared: last first token of {len(SUFFIXES)} prompts with one prefix, ms",
        ("prefix", "cold", "others", "together", "over the bound", "worst"),
    ),
}
"""Of each measurement: title and columns."""


Found = Mapping[str, Mapping[Cell, Sequence[Figure]]]
"""By contender and cell, turn by turn."""


def report(turns: int, found: Found) -> Report:
    ours, targets = found.get(OURS, {}), []
    if {("decode", number) for number in _TARGET_STREAMS} <= ours.keys():
        speeds = [_each(ours["decode", number], "tokens_per_s") for number in reversed(_TARGET_STREAMS)]
        targets.append(Target("decode, 8 streams over 1", median_ratio(*speeds), RATIO_TARGET, most=False))
    for (what, number), figures in ours.items():
        if what == "gap":
            worst = 1e3 * max(_each(figures, "largest_s"))
            targets.append(Target(f"worst gap while {number} tokens are read", worst, GAP_TARGET_MS, unit=" ms"))
        elif what == "drop":
            after = 1e3 * median(_each(figures, "after_s"))
            targets.append(Target(f"first token after a drop at {number}", after, DROP_TARGET_MS, unit=" ms"))
        elif what == "shared":
            title = f"shared prefix of {number}, last first token over the bound"
            targets.append(Target(title, median(_each(figures, "ratio")), SHARED_TARGET))
    tables = []
    contenders: dict[str, dict[str, dict[str, object]]] = {}
    for measured, (title, columns) in _TABLES.items():
        rows = []
        for name, cells in found.items():
            for (what, number), figures in cells.items():
                if what == measured:
                    rows.append((name, str(number), *_cells(figures)))
                    fields = {field: [getattr(one, field) for one in figures] for field in figures[0]._fields}
                    contenders.setdefault(name, {}).setdefault(what, {})[str(number)] = fields
        tables.append(Table(title, ("", *columns), rows))
    return Report(targets, tables, {"turns": turns, "contenders": contenders}, _NOTE)


def _cells(figures: Sequence[Figure]) -> Sequence[str]:
    first = figures[0]
    if isinstance(first, Rate):
        return [f"{median(_each(figures, 'tokens_per_s')):.1f}{'' if all(_each(figures, 'together')) else '*'}"]
    if isinstance(first, Gaps):
        largest = _each(figures, "largest_s")
        came = [seconds for seconds in _each(figures, "newcomer_s") if seconds is not None]
        times = median(largest), max(largest), median(_each(figures, "median_s"))
        return [*map(_ms, times), _ms(median(came)) if came else "-"]
    medians = [_ms(median(_each(figures, field))) for field in first._fields]
    if isinstance(first, Dropped):
        return [*medians, _ms(max(_each(figures, "after_s")))]
    ratios = _each(figures, "ratio")
    return [*medians, f"{median(ratios):.2f}", f"{max(ratios):.2f}"]


def _each(figures: Sequence[Figure], field: str) -> list[float]:
    return [getattr(one, field) for one in figures]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}"


CONTENDERS = (OURS, IN_TURN, MLX_LM, BARE)
MEASURED = ("decode", "gap", "drop", "shared")
SIZE = M10
STREAM_TOKENS = 128
"""Of each decoding stream."""
PREFIX_TOKENS = 500
_CELL_S = 300.0
"""The most that one contender may take for one figure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, known, meaning in (
        ("--contenders", CONTENDERS, f"the contenders; {MLX_LM} where its packages are installed"),
        ("--measure", MEASURED, "what is measured"),
    ):
        parser.add_argument(
            name,
            type=names_of(known),
            default=known,
            metavar="NAME,...",
            help=f"{meaning}: of {', '.join(known)} (default: all)",
        )
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="of each contender (default: %(default)s)")
    parser.add_argument(
        "--parallel", type=int, default=8, metavar="N", help="requests at once in a server (default: %(default)s)"
    )
    parser.add_argument(
        "--streams", type=numbers, default=(1, 2, 4, 8), metavar="N,...", help="that decode at once (default: 1,2,4,8)"
    )
    parser.add_argument(
        "--prompts",
        type=numbers,
        default=(500, 2000),
        metavar="N,...",
        help="tokens of long prompts (default: 500,2000)",
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """The whole benchmark. `say` is told how far it is. ValueError when the options make no sense."""
    if min(arguments.turns, arguments.parallel, *arguments.streams, *arguments.prompts) < 1:
        raise ValueError("turns, streams and lengths are at least 1")
    if taken := {name for name, _ in arguments.peer} & set(CONTENDERS):
        raise ValueError(f"--peer {', '.join(taken)}: the name is taken")
    lengths = {"decode": arguments.streams, "shared": (PREFIX_TOKENS,)}
    cells = [(what, number) for what in arguments.measure for number in lengths.get(what, arguments.prompts)]
    blas, threads, prompts = arguments.blas, arguments.blas_threads, Prompts(arguments.seed)
    found: dict[str, dict[Cell, Sequence[Figure]]] = {}
    with asyncio.Runner() as loop, ExitStack() as stack:
        started = serve(SIZE, arguments.seed, _servers(arguments, say), stack, loop)
        bare = BareLoop(SIZE, arguments.seed, stack, blas=blas, blas_threads=threads)

        def served(endpoint: Endpoint, cell: Cell) -> Figure:
            return loop.run(measure(endpoint, cell, prompts))

        def looped(streams: int) -> Figure:
            return Rate(bare.decode([prompts.ids(SHORT_TOKENS) for _ in range(streams)], STREAM_TOKENS), True)

        for cell in cells:
            say(f"{cell[0]} {cell[1]} ...")
            contenders: dict[str, Callable[[], Figure]] = {
                name: partial(served, one, cell) for name, one in started.items()
            }
            if BARE in arguments.contenders and cell[0] == "decode":
                contenders[BARE] = partial(looped, cell[1])
            for name, figures in interleave(contenders, arguments.turns).items():
                found.setdefault(name, {})[cell] = figures
    return report(arguments.turns, found)


async def measure(endpoint: Endpoint, cell: Cell, prompts: Prompts) -> Figure:
    """Returns one figure of a server. Raises what clients raise, `MismeasuredError` and TimeoutError."""
    what, number = cell
    async with asyncio.timeout(_CELL_S):
        await ask(endpoint, prompts.text(SHORT_TOKENS), 1)  # what the last turn left behind is over
        if what == "decode":
            return await decode(endpoint, prompts, number, STREAM_TOKENS)
        if what == "gap":
            return await gaps(endpoint, prompts, number)
        return await (drop if what == "drop" else share)(endpoint, prompts, number)


def _servers(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[Server]:
    blas, threads = arguments.blas, arguments.blas_threads
    servers = [
        this_runner(name, parallel, blas=blas, blas_threads=threads)
        for name, parallel in ((OURS, arguments.parallel), (IN_TURN, 1))
        if name in arguments.contenders
    ]
    servers += known_mlx_lm(blas, threads, say) if MLX_LM in arguments.contenders else []
    return servers + [other_runner(name, command, arguments.parallel) for name, command in arguments.peer]
