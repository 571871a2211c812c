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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from scripts.tools.bench.common.bare_loop import BareLoop
from scripts.tools.bench.common.contenders import known_mlx_lm, serve
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.options import names_of, numbers
from scripts.tools.bench.common.requests import SHORT_TOKENS, ask
from scripts.tools.bench.common.servers import Endpoint, Server, other_runner, this_runner
from scripts.tools.bench.llamas import M10, Prompts
from scripts.tools.bench.parallel.clients import Rate, decode, drop, gaps, share
from scripts.tools.bench.parallel.report import BARE, IN_TURN, MLX_LM, OURS, Cell, Figure, ParallelReport

CONTENDERS = (OURS, IN_TURN, MLX_LM, BARE)
MEASURED = ("decode", "gap", "drop", "shared")
SIZE = M10
STREAM_TOKENS = 128
"""Of each decoding stream."""
PREFIX_TOKENS = 500
_CELL_S = 300.0
"""The most that one contender may take for one figure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
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


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> ParallelReport:
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
                name: partial(served, one.endpoint, cell) for name, one in started.items()
            }
            if BARE in arguments.contenders and cell[0] == "decode":
                contenders[BARE] = partial(looped, cell[1])
            for name, figures in interleave(contenders, arguments.turns).items():
                found.setdefault(name, {})[cell] = figures
    return ParallelReport(arguments.turns, found)


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
