"""`scripts/bench memory`: what is held for conversations that share a prefix, and whether memory grows for ever.

sharing   30 conversations on one prefix take turns, two requests each, over a Llama of 11 million parameters: the
          growth of the processes, as they tell and as the system sees it
growth    1,000 short prompts that share nothing, over a Llama of a million parameters; the runner has a budget for its
          cache, and mlx-lm's server keeps its 10 copies
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scripts.tools.bench.common.contenders import OURS, servers
from scripts.tools.bench.common.figure import Bars, Chart, Lines
from scripts.tools.bench.common.report import Report, Table, Target
from scripts.tools.bench.common.requests import answer
from scripts.tools.bench.common.servers import Endpoint, Server
from scripts.tools.bench.llamas import M1, M10, Prompts, Size, make_model, write_model
from scripts.tools.bench.memory.growth import Growth, Sample, Slope, grow, sample
from scripts.tools.bench.memory.sharing import Shape, converse
from scripts.tools.host.lib import Client, Process

SHARING, GROWTH = MEASURES = ("sharing", "growth")
HELD_TARGET = 1.10
RISE_TARGET = 0.02
_MB = 1e6
_NOTE = """sharing   growth since a first prompt of the length of the prefix was answered. told: MLX's memory in
          /v1/status; resident: the whole process, less where it had room left from that first prompt; x: over
          the bytes of all distinct tokens
growth    a straight line through the second half of the prompts; KB: of 1,000 bytes"""
_MEANINGS = {
    "prefix": "tokens that all conversations share",
    "conversations": "how many there are",
    "turns": "requests of each",
    "message": "tokens that a user says",
    "answer": "tokens of an answer",
}


class Sizes(NamedTuple):
    """Of the models of the two parts."""

    sharing: Size = M10
    growth: Size = M1


_USUAL = Sizes()


@dataclass(frozen=True)
class MemoryReport(Report):
    """By server: `processes` with the conversations, and `samples` over many prompts."""

    shape: Shape
    budget: str
    token_bytes: int
    processes: Mapping[str, Growth]
    samples: Mapping[str, Sequence[Sample]]

    @property
    def distinct(self) -> int:
        """Bytes of all tokens at the end, each counted once."""
        return self.token_bytes * self.shape.distinct(self.shape.conversations * self.shape.turns)

    @property
    def targets(self) -> Sequence[Target]:
        """Of ours."""
        found = []
        if self.processes and (told := self.processes[OURS].told) is not None:
            found.append(Target("held, of the distinct tokens' bytes", told / self.distinct, HELD_TARGET))
        if self.samples:
            share = 100 * _slope(self.samples[OURS]).share
            found.append(Target("resident: growth over the second half", share, 100 * RISE_TARGET, unit=" %"))
        return found

    @property
    def note(self) -> str:
        """The meaning of the columns."""
        return _NOTE

    @property
    def tables(self) -> Sequence[Table]:
        """One for each part."""
        shape = self.shape
        title = (
            f"sharing: {shape.conversations} conversations in turns, {shape.turns} requests each, on a prefix of "
            f"{shape.prefix} tokens: {self.distinct / _MB:.1f} MB are distinct"
        )
        sharing = [
            (name, *(cell for grown in (growth.told, growth.resident) for cell in _cells(grown, self.distinct)))
            for name, growth in self.processes.items()
        ]
        growth = []
        for name, samples in self.samples.items():
            slope = _slope(samples)
            half = (samples[-1].prompts - samples[len(samples) // 2].prompts) or 1
            cells = (f"{slope.begin / _MB:.1f}", f"{100 * slope.share:.2f}", f"{slope.rise / half / 1e3:.2f}")
            growth.append((name, str(samples[-1].prompts), *cells))
        return [
            Table(title, ("", "told MB", "x", "resident MB", "x"), sharing),
            Table(
                f"growth: prompts that share nothing, {self.budget} for ours",
                ("", "prompts", "resident MB", "growth %", "KB a prompt"),
                growth,
            ),
        ]

    def data(self) -> Mapping[str, object]:
        """For JSON: bytes before and after the conversations, and of each sample."""
        return {
            "shape": self.shape._asdict(),
            "token_bytes": self.token_bytes,
            "distinct_bytes": self.distinct,
            "budget": self.budget,
            "processes": {
                name: {"before": growth.before._asdict(), "after": growth.after._asdict()}
                for name, growth in self.processes.items()
            },
            "samples": {name: [one._asdict() for one in samples] for name, samples in self.samples.items()},
        }

    @property
    def charts(self) -> Sequence[Chart]:
        """The growth with the conversations, and the processes over many prompts."""
        grown = {name: [growth.resident / _MB] for name, growth in self.processes.items()}
        resident = {name: [(one.prompts, one.rss / _MB) for one in samples] for name, samples in self.samples.items()}
        return [
            *([Bars("resident memory for the conversations, MB", ["growth"], grown, digits=1)] if grown else []),
            *([Lines("resident after so many prompts, MB", resident, "prompts")] if resident else []),
        ]


def _slope(samples: Sequence[Sample]) -> Slope:
    return Slope.of([one.prompts for one in samples], [one.rss for one in samples])


def _cells(grown: int | None, distinct: int) -> tuple[str, str]:
    return ("-", "-") if grown is None else (f"{grown / _MB:.1f}", f"{grown / distinct:.2f}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument(
        "--measure",
        action="append",
        choices=MEASURES,
        metavar="PART",
        help="sharing or growth only (default: both)",
    )
    for name, meaning in _MEANINGS.items():
        usual = Shape._field_defaults[name]
        parser.add_argument(f"--{name}", type=int, default=usual, metavar="N", help=f"{meaning} (default: {usual})")
    parser.add_argument("--prompts", type=int, default=1000, metavar="N", help="of growth (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=40, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument(
        "--cache-memory", default="4MiB", metavar="BYTES", help="of the runner in growth (default: %(default)s)"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None], sizes: Sizes = _USUAL) -> MemoryReport:
    """The whole benchmark. ValueError when the options make no sense, or a server does not start."""
    shape = Shape(*(getattr(arguments, name) for name in Shape._fields))
    if min(*shape, arguments.prompt_tokens) < 1 or shape.answer < 2 or arguments.prompts < 4:
        raise ValueError("there is at least one of everything, two tokens in an answer, and four prompts")
    measured = arguments.measure or MEASURES
    return MemoryReport(
        shape,
        arguments.cache_memory,
        token_bytes(sizes.sharing),
        asyncio.run(_processes(arguments, sizes.sharing, shape, say)) if SHARING in measured else {},
        asyncio.run(_growth(arguments, sizes.growth, say)) if GROWTH in measured else {},
    )


def token_bytes(size: Size) -> int:
    """Returns the bytes of the keys and values of one token in all layers, in float32."""
    layer = make_model(size._replace(layers=1), seed=0).layers[0].self_attn
    return size.layers * 4 * sum(int(matrix.weight.shape[0]) for matrix in (layer.k_proj, layer.v_proj))


async def _processes(
    arguments: argparse.Namespace, size: Size, shape: Shape, say: Callable[[str], None]
) -> dict[str, Growth]:
    found = {}
    with _models(size, arguments.seed) as directory:
        for server in servers(arguments, say):
            say(f"sharing: {server.name} ...")
            async with _running(server, directory) as (process, told, endpoint):
                prompts = Prompts(arguments.seed)

                async def said(prompt: str, endpoint: Endpoint = endpoint) -> str:
                    return (await answer(endpoint, prompt, shape.answer)).text

                await said(prompts.text(shape.prefix))
                before = await sample(process, told)
                await converse(said, shape, prompts.text)
                found[server.name] = Growth(before, await sample(process, told))
    return found


async def _growth(arguments: argparse.Namespace, size: Size, say: Callable[[str], None]) -> dict[str, list[Sample]]:
    found = {}
    with _models(size, arguments.seed) as directory:
        for server in servers(arguments, say, MLX_RUNNER_CACHE_MEMORY=arguments.cache_memory):
            say(f"growth: {server.name} ...")
            async with _running(server, directory) as (process, told, endpoint):
                prompts = Prompts(arguments.seed)
                found[server.name] = await grow(
                    process, told, endpoint, prompts, arguments.prompts, arguments.prompt_tokens
                )
    return found


@contextmanager
def _models(size: Size, seed: int) -> Iterator[Path]:
    with TemporaryDirectory(prefix="bench-memory-") as directory:
        write_model(Path(directory), make_model(size, seed), size)
        yield Path(directory)


@asynccontextmanager
async def _running(server: Server, model: Path) -> AsyncIterator[tuple[Process, Client | None, Endpoint]]:
    """The process, one who asks it for its status if it has one, and where requests go."""
    async with AsyncExitStack() as closing:
        stack = closing.enter_context(ExitStack())
        process = server.start(model, stack)
        endpoint = server.endpoint(process, model)
        closing.push_async_callback(endpoint.close)
        told = None if server.speaks_openai else await closing.enter_async_context(Client.of(process))
        yield process, told, endpoint
