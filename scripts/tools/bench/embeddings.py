"""`scripts/bench embeddings`: many short texts to one runner, at once and one after the other, over real HTTP.

The models are encoders of random weights: `small` has 0.4 M parameters, so that what a request costs beside computing
shows, and `270m` the layers of EmbeddingGemma 2 (137 M without the vocabulary), so that computing shows.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from scripts.tools.bench.report import Report, Rounds, Table, Target, interleave
from scripts.tools.bench.servers import OURS, this_runner
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


def texts_per_s(connections: Sequence[HTTPConnection], *, at_once: bool) -> float:
    """Returns how many texts a second are embedded, all of them told apart, each through a connection of its own."""
    texts = [f"{number:03d} word"[:CHARACTERS] for number in range(len(connections))]
    found = []
    started = perf_counter()
    for connection, text in zip(connections, texts, strict=True):
        connection.request("POST", "/v1/embeddings", json.dumps({"content": text}))
        if not at_once:
            found.append(connection.getresponse().read())
    if at_once:
        found = [connection.getresponse().read() for connection in connections]
    seconds = perf_counter() - started
    embeddings = {tuple(json.loads(each)["embedding"]) for each in found}
    assert len(embeddings) == len(texts), "texts have the same embedding"
    return len(texts) / seconds


def measure(size: str, turns: int) -> Rounds:
    """Returns texts a second of each way, turn by turn. Raises `LoadError`."""
    with TemporaryDirectory(prefix="bench-embeddings-") as folder, ExitStack() as stack:
        model = write_encoder(Path(folder), size)
        process = this_runner(OURS, 1).start(model, stack)
        # A client of asyncio would take as long for a text as the runner, on the same cores.
        connections = [stack.enter_context(closing(HTTPConnection("127.0.0.1", process.port))) for _ in range(TEXTS)]
        texts_per_s(connections, at_once=True)
        ways = {
            AT_ONCE: lambda: {CASE: texts_per_s(connections, at_once=True)},
            IN_TURN: lambda: {CASE: texts_per_s(connections, at_once=False)},
        }
        return Rounds(interleave(ways, turns))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", action="append", choices=SIZES, help="this model only; may be repeated")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Runs the benchmark. Raises ValueError if the runner does not start."""
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
