"""`scripts/bench real`: a trained model, SmolLM2-135M-Instruct in 4 bits, beside what people would pick for it.

Every server runs at its default settings: `ours` with the directory that `scripts/real-model` makes (93 MB are fetched
once), llama.cpp's server, if --llama-server names one, with the GGUF file it was made from. mlx_lm.server has the same
directory on a GPU; on a CPU, where it needs seconds for a token of packed or 16-bit weights, it has them in float32.
All rest while another one is measured; every round has prompts of its own.

start   from the spawn until the first text of an answer to a short prompt
cold    until the first text of the answer to a prompt of 256 tokens that nobody has seen
again   the same prompt once more
append  its answer and another question behind it
switch  two conversations over one prefix of 200 tokens take turns: the median of four
users   tokens per second of 1, 4 and 8 answers at once, all together
memory  resident, after all that
"""

import argparse
import asyncio
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
from tokenizers import Tokenizer

from runner.model.weights.dtype import device
from scripts.tools.bench.common.contenders import MLX_LM, OURS, known_mlx_lm, open_endpoint
from scripts.tools.bench.common.figure import Bars, Chart
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.report import Report, Table, Target, median_ratio
from scripts.tools.bench.common.requests import SHORT_TOKENS
from scripts.tools.bench.common.servers import Endpoint, Server, other_runner, this_runner
from scripts.tools.bench.real.conversations import CASES, USERS, Conversations, Turn
from scripts.tools.host.lib import Process
from scripts.tools.host.lib.usage import rss_bytes
from scripts.tools.real.fetch import FetchError, fetch_gguf
from scripts.tools.real.main import make_model

LLAMA = "llama.cpp"


class Contender(NamedTuple):
    """A server and the model that it is started with."""

    server: Server
    model: Path


@dataclass(frozen=True)
class RealReport(Report):
    """All of it: by contender, the seconds of each start, the rounds, and the resident bytes at the end."""

    turns: int
    starts: Mapping[str, Sequence[float]]
    found: Mapping[str, Sequence[Turn]]
    resident: Mapping[str, int]

    @property
    def targets(self) -> list[Target]:
        """Against mlx-lm's server, if it took part."""
        if MLX_LM not in self.found:
            return []
        ours, theirs = self.found[OURS], self.found[MLX_LM]
        found = []
        for case in CASES:
            ratio = median_ratio(*([turn.first_ms[case] for turn in turns] for turns in (ours, theirs)))
            found.append(Target(f"{case}, ours over {MLX_LM}", ratio, 1.0))
        for users in USERS:
            ratio = median_ratio(*([turn.tokens_per_s[users] for turn in turns] for turns in (ours, theirs)))
            found.append(Target(f"{users} at once, ours over {MLX_LM}", ratio, 1.0, most=False))
        return found

    @property
    def tables(self) -> Sequence[Table]:
        """One row for each server."""
        rows = [
            (
                name,
                f"{1e3 * median(self.starts[name]):,.0f}",
                *(f"{median(turn.first_ms[case] for turn in turns):,.0f}" for case in CASES),
                *(f"{median(turn.tokens_per_s[users] for turn in turns):,.1f}" for users in USERS),
                f"{self.resident[name] / 1e6:,.0f}",
            )
            for name, turns in self.found.items()
        ]
        columns = ("", "start ms", *(f"{case} ms" for case in CASES), *(f"{users} tokens/s" for users in USERS), "MB")
        return [Table(f"SmolLM2-135M-Instruct, 4 bits: medians of {self.turns} rounds", columns, rows)]

    def data(self) -> Mapping[str, object]:
        """For JSON."""
        return {
            "turns": self.turns,
            "starts_s": self.starts,
            "rounds": {name: [turn._asdict() for turn in turns] for name, turns in self.found.items()},
            "resident_bytes": self.resident,
        }

    @property
    def charts(self) -> Sequence[Chart]:
        """Waits and speeds."""
        waits = {
            name: [median(turn.first_ms[case] for turn in turns) for case in CASES]
            for name, turns in self.found.items()
        }
        speeds = {
            name: [median(turn.tokens_per_s[users] for turn in turns) for users in USERS]
            for name, turns in self.found.items()
        }
        return [
            Bars("cold, ms", CASES[:1], {name: one[:1] for name, one in waits.items()}),
            Bars("known prefix, ms", CASES[1:], {name: one[1:] for name, one in waits.items()}),
            Bars("tokens/s at once", [str(users) for users in USERS], speeds),
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="of each contender (default: %(default)s)")
    parser.add_argument(
        "--llama-server",
        metavar="COMMAND",
        help="llama.cpp's server, with options: `llama-server --parallel 8 --ctx-size 16384`",
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> RealReport:
    """The whole benchmark. ValueError when the options make no sense, or the model cannot be had."""
    if arguments.turns < 1:
        raise ValueError("there is at least one turn")
    with asyncio.Runner() as loop, ExitStack() as stack:
        contenders = _contenders(arguments, say, stack)
        tokenizer = Tokenizer.from_file(str(contenders[0].model / "tokenizer.json"))
        conversations = Conversations(arguments.seed, lambda text: len(tokenizer.encode(text).ids))

        def started(contender: Contender) -> float:
            with ExitStack() as ended:
                return _start_s(contender, conversations, ended, loop)

        say("start ...")
        starts = interleave({one.server.name: partial(started, one) for one in contenders}, arguments.turns)
        processes: dict[str, Process] = {}
        rounds: dict[str, Callable[[], Turn]] = {}

        def measured(name: str, endpoint: Endpoint) -> Turn:
            say(f"{name} ...")
            return loop.run(conversations.turn(endpoint))

        for server, model in contenders:
            processes[server.name] = server.start(model, stack)
            endpoint = open_endpoint(server, processes[server.name], model, stack, loop)
            rounds[server.name] = partial(measured, server.name, endpoint)
        found = interleave(rounds, arguments.turns)
        resident = {name: rss_bytes(process.pid) for name, process in processes.items()}
    return RealReport(arguments.turns, starts, found, resident)


def _contenders(arguments: argparse.Namespace, say: Callable[[str], None], stack: ExitStack) -> list[Contender]:
    blas, threads, users = arguments.blas, arguments.blas_threads, max(USERS)
    try:
        model = make_model()
        work = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
        contenders = [Contender(this_runner(OURS, users, blas=blas, blas_threads=threads), model)]
        contenders += [Contender(other_runner(name, command, users), model) for name, command in arguments.peer]
        for server in known_mlx_lm(blas, threads, say):
            contenders.append(Contender(server, model if device() == "gpu" else _in_float32(work / "float32")))
        if arguments.llama_server:
            llama = Server(LLAMA, shlex.split(arguments.llama_server), {}, speaks_openai=True)
            contenders.append(Contender(llama, fetch_gguf(work)))
    except FetchError as error:
        raise ValueError(str(error)) from error
    return contenders


def _in_float32(directory: Path) -> Path:
    """Writes the model with weights in float32."""
    shutil.copytree(make_model(packed=False), directory)
    for path in directory.glob("*.safetensors"):
        weights = mx.load(str(path))
        assert isinstance(weights, dict)
        mx.save_safetensors(str(path), {name: array.astype(mx.float32) for name, array in weights.items()})
    return directory


def _start_s(contender: Contender, conversations: Conversations, stack: ExitStack, loop: asyncio.Runner) -> float:
    server, model = contender
    spawned = perf_counter()
    endpoint = open_endpoint(server, server.start(model, stack), model, stack, loop)
    prompt = conversations.begin(conversations.text(SHORT_TOKENS))
    return loop.run(conversations.hear(endpoint, prompt, 1)).began - spawned
