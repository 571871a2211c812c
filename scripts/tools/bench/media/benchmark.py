"""`scripts/bench media`: pictures in prompts, against text of the same length.

first    the time to the first token of a prompt with a photo that nobody has seen, and of text alone
again    the same prompt once more
turn     its answer of 16 tokens and 32 more behind it
other    another conversation about the same photo: its features are known, its keys and values are not
text     tokens a second of an answer to text, with the tower loaded and with --no-media
gap      a stream runs, and a photo of 12 megapixels comes: the time between two lines of the stream meanwhile

The model is a Qwen 3.5 of random weights: 11 M parameters, and a tower of one block.
"""

import argparse
import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import mlx.core as mx

from runner.media.families.qwen3_5 import Qwen35
from runner.model.towers.tower import Grid
from scripts.tools.bench.common.contenders import open_endpoint
from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.requests import FEW_TOKENS, SHORT_TOKENS, answer, first_line_s
from scripts.tools.bench.common.servers import RunnerEndpoint, this_runner
from scripts.tools.bench.llamas import M10, Prompts
from scripts.tools.bench.media.model import config_of, make_tower, write_model
from scripts.tools.bench.media.photos import Photos
from scripts.tools.bench.media.report import BLIND, OTHER, PICTURE, SEES, TEXT, Asked, MediaReport
from scripts.tools.bench.parallel.clients import Gaps, gaps_beside
from scripts.tools.host.lib import Medium

SIZE = M10
TOWER_BLOCKS, TOWER_WIDTH = 1, 64
SMALL, LARGE = (640, 480), (4032, 3024)
BEFORE_TOKENS, ANSWER_TOKENS, APPENDED_TOKENS = 100, 16, 32
STREAM_TOKENS = 256
PATIENCE_S = 240.0
_MARKER = "[img-0]"
_AROUND = 2
"""Tokens before and behind a picture."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="of each contender (default: %(default)s)")
    parser.add_argument(
        "--photos", type=int, default=1, metavar="N", help="of 12 megapixels, half a minute each (default: %(default)s)"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> MediaReport:
    """The whole benchmark. ValueError when the options make no sense."""
    if arguments.turns < 1 or arguments.photos < 0:
        raise ValueError("there is at least one turn")
    prompts, photos = Prompts(arguments.seed), Photos(arguments.seed)
    config = config_of(SIZE, TOWER_BLOCKS, TOWER_WIDTH)
    with asyncio.Runner() as loop, ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
        write_model(directory, config, arguments.seed)
        endpoints = {
            name: _start(name, off, arguments, directory, stack, loop) for name, off in ((SEES, "0"), (BLIND, "1"))
        }
        sees = endpoints[SEES]
        say("text ...")

        def speed(name: str) -> float:
            return loop.run(rate(endpoints[name], prompts))

        rates = interleave({name: partial(speed, name) for name in endpoints}, arguments.turns)
        say("first tokens ...")
        kinds: dict[str, Callable[[], Asked]] = {
            PICTURE: lambda: loop.run(ask_about_picture(sees, prompts, photos)),
            TEXT: lambda: loop.run(ask_about_text(sees, prompts)),
        }
        asked = interleave(kinds, arguments.turns)
        gaps = []
        for number in range(arguments.photos):
            say(f"photo {number + 1} ...")
            gaps.append(loop.run(gaps_beside_photo(sees, prompts, photos)))
    return MediaReport(asked, rates, gaps, longest_piece_s(config, arguments.seed) if gaps else 0.0)


async def ask_about_picture(endpoint: RunnerEndpoint, prompts: Prompts, photos: Photos) -> Asked:
    """One turn of a prompt with a new photo."""
    shown = RunnerEndpoint(endpoint.client, Medium(photos.jpeg(*SMALL)))
    about = _MARKER + prompts.text(FEW_TOKENS)
    asked = await _conversation(shown, prompts.text(BEFORE_TOKENS) + about, prompts)
    other_s = await first_line_s(shown, prompts.text(BEFORE_TOKENS) + about)
    return asked._replace(ms={**asked.ms, OTHER: 1e3 * other_s})


async def ask_about_text(endpoint: RunnerEndpoint, prompts: Prompts) -> Asked:
    """One turn of a prompt as long as that with the photo."""
    soft = Qwen35().geometry(*SMALL).tokens + _AROUND
    return await _conversation(endpoint, prompts.text(BEFORE_TOKENS + soft + FEW_TOKENS), prompts)


async def rate(endpoint: RunnerEndpoint, prompts: Prompts) -> float:
    """Tokens a second of one answer to a short text."""
    return (await answer(endpoint, prompts.text(SHORT_TOKENS), STREAM_TOKENS)).tokens_per_s


async def gaps_beside_photo(endpoint: RunnerEndpoint, prompts: Prompts, photos: Photos) -> Gaps:
    """A stream runs, and a large photo comes."""
    shown = RunnerEndpoint(endpoint.client, Medium(photos.jpeg(*LARGE)))
    return await gaps_beside(endpoint, prompts, lambda: first_line_s(shown, _MARKER + prompts.text(1)), PATIENCE_S)


def longest_piece_s(config: Mapping[str, object], seed: int) -> float:
    """Returns how long the longest slice of the tower takes with the large photo, and nothing beside it."""
    tower, geometry = make_tower(config, seed), Qwen35().geometry(*LARGE)
    rows = mx.zeros((geometry.rows * geometry.columns, tower.patch_embed.weight.shape[1]), mx.uint8)
    longest_s, started = 0.0, perf_counter()
    for part in tower.encode(rows, Grid(geometry.rows, geometry.columns)):
        mx.eval(part)
        longest_s, started = max(longest_s, perf_counter() - started), perf_counter()
    return longest_s


async def _conversation(endpoint: RunnerEndpoint, prompt: str, prompts: Prompts) -> Asked:
    ms, computed = dict[str, float](), dict[str, int]()

    async def first(case: str, prompt: str, tokens: int) -> str:
        answered = await answer(endpoint, prompt, tokens)
        ms[case] = 1e3 * answered.first_s
        computed[case] = endpoint.prompt_tokens - (endpoint.cached or 0)
        return answered.text

    text = await first("first", prompt, ANSWER_TOKENS)
    await first("again", prompt, FEW_TOKENS)
    await first("turn", prompt + text + prompts.text(APPENDED_TOKENS), FEW_TOKENS)
    return Asked(ms, computed)


def _start(
    name: str, off: str, arguments: argparse.Namespace, model: Path, stack: ExitStack, loop: asyncio.Runner
) -> RunnerEndpoint:
    server = this_runner(name, 8, blas=arguments.blas, blas_threads=arguments.blas_threads)
    server.environment["MLX_RUNNER_NO_MEDIA"] = off
    endpoint = open_endpoint(server, server.start(model, stack), model, stack, loop)
    assert isinstance(endpoint, RunnerEndpoint)
    return endpoint
