"""`scripts/bench families`: models of many architectures beside the llama, by time per active parameter.

Each has random weights in 4 bits in groups of 64, 77 to 111 million active parameters (those by which the forward of
one token multiplies), and no drafts. A turn is a process of its own, so every figure begins with an empty cache.
With --llama-server, llama.cpp serves the same weights as GGUF (Q4_1).

start   from the spawn until the first token of a short prompt
turn    three new tokens on 2,000: until the first token of the next turn
prompt  until the first token after a prompt of 334 tokens that nobody has seen
again   the same prompt once more
1, 4, 8 tokens per second of that number of answers at once, all together
"""

import argparse
import asyncio
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

from scripts.tools.bench import gguf
from scripts.tools.bench.family_models import FAMILIES, VOCABULARY, Parameters, make
from scripts.tools.bench.llamas import Prompts
from scripts.tools.bench.report import Report, Rounds, Table, Target, interleave
from scripts.tools.bench.servers import (
    FEW_TOKENS,
    OURS,
    SHORT_TOKENS,
    Answered,
    Endpoint,
    Server,
    answer,
    open_endpoint,
    this_runner,
)

PROMPT_TOKENS, LONG_TOKENS, NEW_TOKENS, STREAM_TOKENS = 334, 2000, 3, 48
STREAMS = {streams: f"{streams} streams" for streams in (1, 4, 8)}
CASES = ("start", "turn", "prompt", "again", *STREAMS.values())
"""All are milliseconds: with streams, of one token of all."""
LLAMA, LLAMA_CPP = FAMILIES[0], "llama.cpp"
OF_LLAMA = {"prompt": 1.5, "turn": 1.5, STREAMS[1]: 1.4}
"""At most, per active parameter."""
OF_LLAMA_CPP = {"prompt": 0.5, STREAMS[1]: 1.0}
"""At most, with the same weights."""

Figures = Mapping[str, float]


class Contender(NamedTuple):
    family: str
    server: Server
    model: Path

    @property
    def name(self) -> str:
        return name_of(self.family, self.server.name)

    def turn(self, prompts: Prompts, loop: asyncio.Runner) -> Figures:
        spawned = perf_counter()
        with ExitStack() as stack:
            process = self.server.start(self.model, stack)
            endpoint = open_endpoint(self.server, process, self.model, stack, loop)
            return loop.run(_figures(endpoint, prompts, spawned))


def name_of(family: str, server: str) -> str:
    return family if server == OURS else f"{family}, {server}"


async def _figures(endpoint: Endpoint, prompts: Prompts, spawned: float) -> Figures:
    begun = await answer(endpoint, prompts.text(SHORT_TOKENS), 1)
    long = prompts.text(LONG_TOKENS)
    answered = await answer(endpoint, long, FEW_TOKENS)
    # The last token of an answer was drawn, but not computed.
    turn = await answer(endpoint, long + answered.text + prompts.text(NEW_TOKENS - 1), 1)
    prompt = prompts.text(PROMPT_TOKENS)
    cold, again = [await answer(endpoint, prompt, FEW_TOKENS) for _ in range(2)]
    times = [begun.times[0] - spawned, turn.first_s, cold.first_s, again.first_s]
    times += [await _token_s(endpoint, prompts, streams) for streams in STREAMS]
    return {case: 1e3 * seconds for case, seconds in zip(CASES, times, strict=True)}


async def _token_s(endpoint: Endpoint, prompts: Prompts, streams: int) -> float:
    """Returns the seconds for each token of answers written at once, from the first of all to the last."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(endpoint, prompts.text(SHORT_TOKENS), STREAM_TOKENS)) for _ in range(streams)]
    answers: list[Answered] = [task.result() for task in tasks]
    seconds = max(each.times[-1] for each in answers) - min(each.times[0] for each in answers)
    return seconds / (streams * (STREAM_TOKENS - 1))


def report(turns: int, found: Mapping[str, Sequence[Figures]], parameters: Mapping[str, Parameters]) -> Report:
    """Returns the results; `found` is by `name_of`."""
    rounds = Rounds(found)
    servers = list(dict.fromkeys(name.partition(", ")[2] or OURS for name in found))
    present = {server: [each for each in parameters if name_of(each, server) in found] for server in servers}
    targets, measured, per_active = [], [], []
    beside: dict[str, list[list[str]]] = {server: [] for server in servers if server != OURS}
    for server, families in present.items():
        for family in families:
            name = name_of(family, server)
            medians = {case: rounds.median(name, case) for case in CASES}
            cells = [f"{1e3 / ms:,.0f}" if case in STREAMS.values() else f"{ms:,.0f}" for case, ms in medians.items()]
            measured.append([name, *(f"{number / 1e6:.0f}" for number in parameters[family]), *cells])
            weight = parameters[LLAMA].active / parameters[family].active
            ratios = {case: weight * rounds.ratio(name, name_of(LLAMA, server), case) for case in CASES[1:]}
            per_active.append([name, *(f"{ratio:.2f}" for ratio in ratios.values())])
            if server != OURS:
                of_other = {case: rounds.ratio(family, name, case) for case in CASES}
                beside[server].append([family, *(f"{ratio:.2f}" for ratio in of_other.values())])
                if server == LLAMA_CPP:
                    targets += [
                        Target(f"{family}, {case}, time over {server}'s", of_other[case], bound)
                        for case, bound in OF_LLAMA_CPP.items()
                    ]
            elif family != LLAMA:
                targets += [
                    Target(f"{family}, {case}, time per active parameter over the llama's", ratios[case], bound)
                    for case, bound in OF_LLAMA.items()
                ]
    columns = [f"{case} ms" for case in CASES if case not in STREAMS.values()]
    columns += [f"{streams} tokens/s" for streams in STREAMS]
    tables = [
        Table(f"families: medians of {turns} turns", ("", "all, M", "active, M", *columns), measured),
        Table("time per active parameter over the llama's", ("", *CASES[1:]), per_active),
        *(Table(f"time over that of {server}", ("", *CASES), rows) for server, rows in beside.items()),
    ]
    sizes = {family: size._asdict() for family, size in parameters.items()}
    return Report(targets, tables, {"turns": turns, "parameters": sizes, "ms": found})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", action="append", choices=FAMILIES, help="this family beside the llama only; may be repeated"
    )
    parser.add_argument(
        "--llama-server",
        metavar="COMMAND",
        help="llama.cpp's server, with options: `llama-server --parallel 8 --ctx-size 20480`",
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Runs the benchmark. Raises ValueError if a contender does not start."""
    streams = max(STREAMS)
    peers = [Server(name, command, {"OLLAMA_NUM_PARALLEL": str(streams)}) for name, command in arguments.peer]
    servers = [this_runner(OURS, streams), *peers]
    prompts = Prompts(arguments.seed, VOCABULARY)
    parameters: dict[str, Parameters] = {}
    contenders = []
    with asyncio.Runner() as loop, TemporaryDirectory(prefix="bench-") as work:
        for family in dict.fromkeys((LLAMA, *(arguments.only or FAMILIES))):
            say(f"{family} is made ...")
            directory = Path(work, family)
            directory.mkdir()
            parameters[family] = make(family, arguments.seed, directory)
            contenders += [Contender(family, server, directory) for server in servers]
            if arguments.llama_server:
                file = directory.with_suffix(".gguf")
                gguf.write(family, directory, file)
                llama = Server(LLAMA_CPP, shlex.split(arguments.llama_server), {}, speaks_openai=True)
                contenders.append(Contender(family, llama, file))

        def measured(contender: Contender) -> Figures:
            say(f"{contender.name} ...")
            return contender.turn(prompts, loop)

        found = interleave({each.name: partial(measured, each) for each in contenders}, arguments.turns)
    return report(arguments.turns, found, parameters)
