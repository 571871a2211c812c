"""`scripts/bench formats`: in which number format a CPU is fast, and what `--dtype auto` brings.

Llamas of random weights are written in every format that models come in: 16 bits, float32, and 8 or 4 bits with scales
in bfloat16. Each is loaded by the runner as the model has it (`keep`) and as `auto` has it here: on a CPU with memory
enough, everything that is not packed in float32, scales and norms included. All take turns in one process, on one core.

prefill  tokens per second of a prompt that was never seen, until the first token of the answer is there
decode   tokens per second of one greedy stream
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from runner.model import open_model
from runner.model.weights.dtype import device
from runner.model.weights.load import load
from runner.settings import CPU_CHUNK_TOKENS
from scripts.tools.bench.bare import decode_bare, first_token_s
from scripts.tools.bench.llamas import M1, M10, M60, Prompts, Size, make_model, write_model
from scripts.tools.bench.one_core import one_core
from scripts.tools.bench.report import Table, Target, text_of
from scripts.tools.bench.turns import take_turns

KEEP, AUTO = "keep", "auto"
FORMATS = ("bfloat16", "float16", "float32", "8-bit", "4-bit")
REFERENCE = "bfloat16"
SIZES = {"m1": M1, "m10": M10, "m60": M60}
_WARM_TOKENS = 4
_GROUP = 64


class Turn(NamedTuple):
    """Tokens per second, of a prompt and of an answer."""

    prefill: float
    decode: float


def _of(turn: Turn, what: str) -> float:
    return turn._asdict()[what]  # type: ignore[no-any-return]  # all of its fields are floats


class Row(NamedTuple):
    """One format of one model. `held_bytes` are those of the weights in memory, kept and as auto."""

    model: str
    format: str
    held_bytes: Mapping[str, int]
    turns: Mapping[str, Sequence[Turn]]

    def speed(self, way: str, what: str) -> float:
        """The median of the turns."""
        return median(_of(turn, what) for turn in self.turns[way])

    def gain(self, what: str) -> float:
        """Of auto over keep, the median of the turns."""
        pairs = zip(self.turns[AUTO], self.turns[KEEP], strict=True)
        return median(_of(auto, what) / _of(keep, what) for auto, keep in pairs)


class FormatsReport(NamedTuple):
    """What was found."""

    rows: Sequence[Row]

    @property
    def targets(self) -> Sequence[Target]:
        """None: auto shall never lose anything, but nobody said how much it has to bring."""
        return ()

    def table(self) -> str:
        """One for prompts, one for answers."""
        return text_of([self._table("prefill"), self._table("decode")])

    def _table(self, what: str) -> Table:
        rows = []
        for row in self.rows:
            reference = next(one for one in self.rows if (one.model, one.format) == (row.model, REFERENCE))
            base = reference.speed(KEEP, what)
            cells = []
            for way in (KEEP, AUTO):
                speed = row.speed(way, what)
                cells += [f"{speed:,.1f}", f"{speed / base:.2f}", f"{row.held_bytes[way] / 1e6:,.1f}"]
            rows.append((f"{row.model} {row.format}", *cells, f"{row.gain(what):.2f}x"))
        columns = ("", KEEP, f"over {REFERENCE}", "MB", AUTO, f"over {REFERENCE} kept", "MB", "auto over keep")
        return Table(f"{what}, tokens/s", columns, rows)

    def data(self) -> Mapping[str, object]:
        """For JSON: every turn."""
        return {
            "rows": [
                {
                    **row._asdict(),
                    "turns": {way: [turn._asdict() for turn in turns] for way, turns in row.turns.items()},
                    "gains": {what: row.gain(what) for what in Turn._fields},
                }
                for row in self.rows
            ]
        }

    def plot(self, path: Path) -> None:
        """Both ways side by side, format by format."""
        from matplotlib.figure import Figure

        from scripts.tools.bench.bars import Bars, draw_bars

        figure = Figure(figsize=(max(7.0, 1.3 * len(self.rows)), 7), layout="constrained")
        for axes, what in zip(figure.subplots(2), Turn._fields, strict=True):
            axes.set_yscale("log")
            axes.set_title(f"{what}, tokens/s", fontsize=10)
            series = [Bars(way, [row.speed(way, what) for row in self.rows]) for way in (KEEP, AUTO)]
            groups = [f"{row.model} {row.format}\n{row.gain(what):.1f}x" for row in self.rows]
            draw_bars(axes, groups, series, room=float("inf"))
            axes.legend(frameon=False, loc="upper right")
        figure.savefig(path, dpi=110)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    for name, default, meaning in (
        ("--turns", 2, "of each contender"),
        ("--prompt", 128, "its length, in tokens"),
        ("--tokens", 24, "of an answer"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{meaning} (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["m10"], help="their sizes (default: m10)")
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="beside bfloat16 (default: all)"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> FormatsReport:
    """Measure. ValueError when the options make no sense."""
    if min(arguments.turns, arguments.prompt, arguments.tokens) < 1:
        raise ValueError("turns and lengths are at least 1")
    if device() == "cpu":
        mx.disable_compile()  # as the runner does
    formats = [REFERENCE, *(name for name in FORMATS if name in arguments.formats and name != REFERENCE)]
    prompts, kept = Prompts(arguments.seed), one_core()

    def turn(name: str, model: llama.Model) -> Turn:
        say(f"{name} ...")
        with kept():
            first_token_s(model, [], prompts.ids(_WARM_TOKENS), CPU_CHUNK_TOKENS)
            seconds = first_token_s(model, [], prompts.ids(arguments.prompt), CPU_CHUNK_TOKENS)
            return Turn(arguments.prompt / seconds, decode_bare(model, [prompts.ids(16)], arguments.tokens))

    rows = []
    for size in arguments.models:
        models = {
            f"{size} {name} {way}": model
            for name in formats
            for way, model in _loaded(SIZES[size], arguments.seed, name).items()
        }
        contenders = {name: partial(turn, name, model) for name, model in models.items()}
        found = take_turns(contenders, arguments.turns, warm=0)
        for name in formats:
            names = {way: f"{size} {name} {way}" for way in (KEEP, AUTO)}
            held = {way: _held_bytes(models[full]) for way, full in names.items()}
            rows.append(Row(size, name, held, {way: found[full] for way, full in names.items()}))
    return FormatsReport(rows)


def _loaded(size: Size, seed: int, name: str) -> Mapping[str, llama.Model]:
    """The model in that format, as the runner loads it both ways."""
    model = make_model(size, seed)
    if name.endswith("-bit"):
        model.set_dtype(mx.bfloat16)
        quantize(model, _GROUP, int(name.removesuffix("-bit")), class_predicate=_fits)
    else:
        model.set_dtype(getattr(mx, name))
    with TemporaryDirectory(prefix="bench-formats-") as directory:
        write_model(Path(directory), model, size)
        opened = open_model(directory, Path("unused"))
        return {way: cast("llama.Model", load(opened, way).module) for way in (KEEP, AUTO)}


def _fits(_: str, layer: Module) -> bool:
    """The smallest model has rows that no groups divide."""
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % _GROUP == 0


def _held_bytes(model: llama.Model) -> int:
    return sum(array.nbytes for _, array in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))
