"""`scripts/bench memory`: what is held for conversations that share a prefix, and whether memory grows for ever.

sharing   30 conversations on one prefix take turns, two requests each, over a Llama of 11 million parameters. The
          runner's cache in this process, as it counts itself, against mlx-lm's own: with room for all conversations,
          and with the 10 copies that its server keeps. Then over HTTP, as the processes tell and as the system sees it
growth    1,000 short prompts that share nothing, over a Llama of a million parameters; the runner has a budget for its
          cache, and mlx-lm's server keeps its 10 copies
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import mlx.core as mx

from runner.model.weights.dtype import device
from scripts.tools.bench.common.contenders import OURS, servers
from scripts.tools.bench.common.requests import answer
from scripts.tools.bench.common.servers import Endpoint, Server
from scripts.tools.bench.llamas import M1, M10, Prompts, Size, make_model, write_model
from scripts.tools.bench.memory.growth import Sample, grow, sample
from scripts.tools.bench.memory.report import Growth, MemoryReport
from scripts.tools.bench.memory.sharing import Cache, LastUsed, Shape, Trie, converse, hold
from scripts.tools.host.lib import Client, Process

SHARING, GROWTH = MEASURES = ("sharing", "growth")
_FEW = 10  # conversations that mlx_lm.server keeps
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
    if device() == "cpu":
        mx.disable_compile()  # as the runner does
    measured = arguments.measure or MEASURES
    report = MemoryReport(shape, arguments.cache_memory)
    if SHARING in measured:
        report = _held(report, sizes.sharing, arguments.seed, say)
        report = replace(report, processes=asyncio.run(_processes(arguments, sizes.sharing, shape, say)))
    if GROWTH in measured:
        report = replace(report, samples=asyncio.run(_growth(arguments, sizes.growth, say)))
    return report


def _held(report: MemoryReport, size: Size, seed: int, say: Callable[[str], None]) -> MemoryReport:
    model = make_model(size, seed)
    trie = Trie(model)
    caches: Mapping[str, Cache] = {OURS: trie, "mlx-lm, all": LastUsed(model), f"mlx-lm, {_FEW}": LastUsed(model, _FEW)}
    held = {}
    for name, cache in caches.items():
        say(f"held: {name} ...")
        held[name] = hold(cache, report.shape, Prompts(seed).ids)
    return replace(report, held=held, token_bytes=trie.token_bytes)


async def _processes(
    arguments: argparse.Namespace, size: Size, shape: Shape, say: Callable[[str], None]
) -> dict[str, Growth]:
    found = {}
    with _models(size, arguments.seed) as directory:
        for server in servers(arguments, say):
            say(f"processes: {server.name} ...")
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
