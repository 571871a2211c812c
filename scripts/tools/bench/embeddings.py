"""`scripts/bench embeddings`: many short texts to one runner, at once and one after the other, over real HTTP.

The models are encoders of random weights: `small` has 0.4 M parameters, so that what a request costs beside computing
shows, and `270m` the layers of EmbeddingGemma 2 (137 M without the vocabulary), so that computing shows.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from scripts.tools.bench.report import Report, Rounds, Table, Target, interleave
from scripts.tools.bench.servers import OURS, this_runner
from scripts.tools.host.lib import Client
from scripts.tools.models.checkpoints import BOS, EOS, write_directory
from scripts.tools.models.sources import published
from scripts.tools.models.sources_form import ENCODERS

SIZES: Mapping[str, Mapping[str, object]] = {
    "small": {},
    "270m": {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 24,
        "head_dim": 256,
        "hidden_size_per_layer_input": 512,
        "sliding_window": 512,
        "per_layer_config": {str(layer): {"head_dim": 512, "num_key_value_heads": 1} for layer in range(5, 24, 6)},
    },
}
TEXTS, CHARACTERS = 64, 6
AT_ONCE, IN_TURN, CASE = "at once", "one after the other", "texts/s"
LEAST = 4.0
"""Times as many texts a second of the small model, at once."""


def write_encoder(directory: Path, size: str) -> Path:
    """Writes the model of this size into `directory` and returns it."""
    source = ENCODERS["embedding-gemma2-texts"]
    module = {**source.module, **SIZES[size]}
    config = {**source.config, "text_config": module, "bos_token_id": BOS, "eos_token_id": EOS}
    return write_directory(directory, config, published(source._replace(module=module, config=config), "float32"))


async def texts_per_s(client: Client, *, at_once: bool) -> float:
    """Returns how many texts a second are embedded, all of them told apart."""
    started = perf_counter()
    asked = [_embedded(client, f"{number:03d} word"[:CHARACTERS]) for number in range(TEXTS)]
    found = await asyncio.gather(*asked) if at_once else [await each for each in asked]
    seconds = perf_counter() - started
    assert len({tuple(each) for each in found}) == TEXTS, "texts have the same embedding"
    return TEXTS / seconds


async def _embedded(client: Client, text: str) -> list[float]:
    reply = await client.send("POST", "/v1/embeddings", json.dumps({"content": text}).encode())
    assert reply.status == 200, reply.text
    return list(json.loads(reply.body)["embedding"])


def measure(size: str, turns: int) -> Rounds:
    """Returns texts a second of each way, turn by turn. Raises `LoadError`."""
    with TemporaryDirectory(prefix="bench-embeddings-") as folder, ExitStack() as stack:
        model = write_encoder(Path(folder), size)
        process = this_runner(OURS, 1).start(model, stack)
        with asyncio.Runner() as loop:

            async def one(at_once: bool) -> Mapping[str, float]:
                async with Client.of(process) as client:
                    return {CASE: await texts_per_s(client, at_once=at_once)}

            ways = {AT_ONCE: lambda: loop.run(one(True)), IN_TURN: lambda: loop.run(one(False))}
            return Rounds(interleave(ways, turns))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", action="append", choices=SIZES, help="this model only; may be repeated")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """The whole benchmark. ValueError if the runner does not start."""
    found: dict[str, Rounds] = {}
    for size in arguments.size or SIZES:
        say(f"{size} ...")
        found[size] = measure(size, arguments.turns)
    ratios = {size: rounds.ratio(AT_ONCE, IN_TURN, CASE) for size, rounds in found.items()}
    targets = (
        [Target("small, texts/s at once over in turn", ratios["small"], LEAST, most=False)] if "small" in found else []
    )
    rows = [
        (size, *(f"{rounds.median(way, CASE):,.0f}" for way in (AT_ONCE, IN_TURN)), f"{ratios[size]:.1f}")
        for size, rounds in found.items()
    ]
    table = Table(f"{TEXTS} texts, texts/s, medians of {arguments.turns} turns", ("", AT_ONCE, IN_TURN, "ratio"), rows)
    figures = {size: {way: rounds.of(way, CASE) for way in (AT_ONCE, IN_TURN)} for size, rounds in found.items()}
    return Report(targets, [table], {"turns": arguments.turns, "texts_per_s": figures})
