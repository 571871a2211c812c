"""`scripts/bench parallel`: several users of one runner at once, over real processes and real HTTP.

A Llama of random weights (11 M parameters) is written into a temporary folder. The contenders are servers that all run
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
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.tools.bench.common.bare_loop import BareLoop
from scripts.tools.bench.common.contenders import known_mlx_lm
from scripts.tools.bench.common.options import names_of, numbers
from scripts.tools.bench.common.servers import Server, other_runner, this_runner
from scripts.tools.bench.llamas import HEAD, Prompts, Size, count_parameters, make_model, write_model
from scripts.tools.bench.parallel.contenders import Bare, Contender, Served, take_turns
from scripts.tools.bench.parallel.report import BARE, IN_TURN, MLX_LM, OURS, ParallelReport, Row, Shape

CONTENDERS = (OURS, IN_TURN, MLX_LM, BARE)
MEASURED = ("decode", "gap", "drop", "shared")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings."""

    contenders: Sequence[str] = CONTENDERS
    peers: Sequence[tuple[str, Sequence[str]]] = ()
    measured: Sequence[str] = MEASURED
    shape: Shape = field(default_factory=Shape)
    size: Size = field(default_factory=Size)
    turns: int = 3
    seed: int = 1
    parallel: int = 8
    blas: str = "auto"
    blas_threads: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    usual = Options()
    parser.epilog = _JSON
    parser.add_argument(
        "--contenders",
        type=names_of(CONTENDERS),
        default=usual.contenders,
        metavar="NAME,...",
        help=f"of {', '.join(CONTENDERS)} (default: all; {MLX_LM} where its packages are installed)",
    )
    parser.add_argument(
        "--measure",
        type=names_of(MEASURED),
        default=usual.measured,
        metavar="WHAT,...",
        help=f"of {', '.join(MEASURED)} (default: all)",
    )
    parser.add_argument(
        "--turns", type=int, default=usual.turns, metavar="N", help="of each contender (default: %(default)s)"
    )
    for name, meaning in _COUNTS.items():
        default = getattr(usual, name, None) or getattr(usual.shape, name, None) or getattr(usual.size, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=default,
            metavar="N",
            help=f"{meaning} (default: {default})",
        )
    for name, default, meaning in (
        ("--streams", usual.shape.streams, "how many decode at once; the first is what the last is held against"),
        ("--prompts", usual.shape.prompts, "lengths of the long prompts, in tokens"),
    ):
        shown = ",".join(map(str, default))
        parser.add_argument(name, type=numbers, default=default, metavar="N,...", help=f"{meaning} (default: {shown})")


_COUNTS = {
    "parallel": "how many requests the contenders may run at once",
    "max_gap_ms": "what the runner is told, and a third of the largest gap that is aimed at",
    "tokens": "of each decoding stream",
    "prefix": "length of the shared prefix, in tokens",
    "hidden": f"width of the model, a multiple of {HEAD}",
    "layers": "of the model",
}

_JSON = """
JSON: benchmark, machine (what it ran on), seed, turns, parameters, streams, tokens, prompts, prefix, max_gap_ms,
limits, contenders. For each contender decode (by the number of streams), gap and drop (by the length of the prompt)
and shared, each with one value for each turn in the figures that parallel/clients.py explains (Rate, Gaps, Dropped,
Shared), and ratio in decode and shared. Times are in seconds."""


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> ParallelReport:
    """The whole benchmark. `say` is told how far it is. ValueError when the options make no sense."""
    options = Options(
        contenders=arguments.contenders,
        peers=arguments.peer,
        measured=arguments.measure,
        shape=Shape(arguments.streams, arguments.tokens, arguments.prompts, arguments.prefix, arguments.max_gap_ms),
        size=Size(arguments.hidden, arguments.layers),
        turns=arguments.turns,
        seed=arguments.seed,
        parallel=arguments.parallel,
        blas=arguments.blas,
        blas_threads=arguments.blas_threads,
    )
    return measure(options, say)


def measure(options: Options, say: Callable[[str], None] = lambda _: None) -> ParallelReport:
    """Start the contenders and let them take turns. Raises what clients raise when a contender breaks."""
    if min(options.turns, options.parallel, *options.shape.streams, *options.shape.prompts, options.shape.prefix) < 1:
        raise ValueError("turns, streams and lengths are at least 1")
    if taken := {name for name, _ in options.peers} & set(CONTENDERS):
        raise ValueError(f"--peer {', '.join(taken)}: the name is taken")
    if options.shape.tokens < 2:
        raise ValueError("a stream has at least 2 tokens")
    numbers = {
        "decode": options.shape.streams,
        "gap": options.shape.prompts,
        "drop": options.shape.prompts,
        "shared": (options.shape.prefix,),
    }
    cells = [(what, number) for what in options.measured for number in numbers[what]]
    servers = _servers(options, say)
    model = make_model(options.size, options.seed)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="bench-parallel-")))
        write_model(directory, model, options.size)
        started = [(server, server.start(directory, stack)) for server in servers]

        async def all_turns() -> list[Row]:
            async with AsyncExitStack() as open_endpoints:
                contenders: list[Contender] = []
                for server, process in started:
                    endpoint = server.endpoint(process, directory)
                    open_endpoints.push_async_callback(endpoint.close)
                    contenders.append(Served(server.name, endpoint, options.shape))
                if BARE in options.contenders:
                    blas, threads = options.blas, options.blas_threads
                    one = BareLoop(options.size, options.seed, stack, blas=blas, blas_threads=threads)
                    contenders.append(Bare(BARE, one, options.shape))
                return await take_turns(contenders, cells, options.turns, Prompts(options.seed), say)

        rows = asyncio.run(all_turns())
    return ParallelReport(options.seed, options.turns, count_parameters(model), options.shape, rows)


def _servers(options: Options, say: Callable[[str], None]) -> list[Server]:
    gap, blas, threads = options.shape.max_gap_ms, options.blas, options.blas_threads
    servers = [
        this_runner(name, parallel, gap, blas=blas, blas_threads=threads)
        for name, parallel in ((OURS, options.parallel), (IN_TURN, 1))
        if name in options.contenders
    ]
    servers += known_mlx_lm(blas, threads, say) if MLX_LM in options.contenders else []
    return servers + [other_runner(name, command, options.parallel) for name, command in options.peers]
