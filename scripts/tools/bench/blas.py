"""`scripts/bench blas`: what the BLAS brings that the runner puts in front of MLX's own on Linux CPUs.

MLX's wheel carries the reference BLAS. A Llama of random weights (11 M parameters, float32) runs in two processes, in
turns: `stock` over that one and `fast` over the runner's. Each is the bare loop on one core; prompts are read in the
chunks that the runner takes.

prefill  tokens per second of a prompt that was never seen, until the first token of the answer is there
decode   tokens per second of one greedy stream
results  all logits of one prompt: the largest difference over the largest logit, and how often the likeliest token of a
         position is the same
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple, cast

from runner import blas

if __name__ == "__main__":
    blas.preload(sys.argv[1], int(sys.argv[2]))  # before MLX

import mlx.core as mx

from runner.settings import CPU_CHUNK_TOKENS
from scripts.tools.bench.bare import BareLoop
from scripts.tools.bench.llamas import M10, Prompts, Size, make_model
from scripts.tools.bench.report import Table, Target, text_of
from scripts.tools.bench.turns import take_turns

STOCK, FAST = "stock", "fast"
PREFILL_GAIN = 8.0
ROUNDING = 1e-5
"""Of the largest logit: float32 has seven digits, and sums of thousands of terms lose one or two."""


class Turn(NamedTuple):
    """Tokens per second: of prompts by their lengths, and of an answer."""

    prefill: Mapping[int, float]
    decode: float


class Results(NamedTuple):
    """Logits of both: the largest difference over the largest logit, and the share of equal choices."""

    difference: float
    agreement: float


class BlasReport(NamedTuple):
    """What was found. `turns` are in the order in which they were taken, those with one index next to each other."""

    name: str
    """Of the fast BLAS."""
    turns: Mapping[str, Sequence[Turn]]
    results: Results

    def gains(self) -> Mapping[str, float]:
        """The fast one's speed over the stock one's, the median of the turns, by what was done."""
        pairs = list(zip(self.turns[FAST], self.turns[STOCK], strict=True))
        lengths = self.turns[FAST][0].prefill
        gains = {f"prefill {n}": median(fast.prefill[n] / stock.prefill[n] for fast, stock in pairs) for n in lengths}
        return {**gains, "decode": median(fast.decode / stock.decode for fast, stock in pairs)}

    @property
    def targets(self) -> Sequence[Target]:
        """The gain of every prompt; equal results."""
        gains = [
            Target(f"{name} tokens, fast over stock", gain, PREFILL_GAIN, most=False, unit="x")
            for name, gain in self.gains().items()
            if name != "decode"
        ]
        return [
            *gains,
            Target("logits, difference over scale", self.results.difference, ROUNDING),
            Target("logits, equal choices", self.results.agreement, 1.0, most=False),
        ]

    def speeds(self) -> Mapping[str, Mapping[str, float]]:
        """Median tokens per second, by what was done and by whom."""
        lengths = self.turns[FAST][0].prefill
        speeds = {
            f"prefill {n}": {who: median(one.prefill[n] for one in found) for who, found in self.turns.items()}
            for n in lengths
        }
        return {**speeds, "decode": {who: median(one.decode for one in found) for who, found in self.turns.items()}}

    def table(self) -> str:
        """Speeds and gains."""
        gains = self.gains()
        rows = [
            (what, f"{speeds[STOCK]:,.1f}", f"{speeds[FAST]:,.1f}", f"{gains[what]:.2f}x")
            for what, speeds in self.speeds().items()
        ]
        return text_of([Table(f"tokens/s over MLX's own BLAS and over {self.name}", ("", STOCK, FAST, "gain"), rows)])

    def data(self) -> Mapping[str, object]:
        """For JSON: every turn."""
        turns = {who: [one._asdict() for one in found] for who, found in self.turns.items()}
        return {"blas": self.name, "turns": turns, "gains": self.gains(), "results": self.results._asdict()}

    def plot(self, path: Path) -> None:
        """Speeds side by side, on a scale that shows both."""
        from matplotlib.figure import Figure

        from scripts.tools.bench.bars import Bars, draw_bars

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        speeds = self.speeds()
        axes.set_yscale("log")
        axes.set_title(f"Tokens/s over MLX's own BLAS and over {self.name}", fontsize=10)
        series = [Bars(who, [speeds[what][who] for what in speeds]) for who in (STOCK, FAST)]
        groups = [f"{what}\n{gain:.1f}x" for what, gain in self.gains().items()]
        draw_bars(axes, groups, series, room=float("inf"))
        axes.legend(frameon=False)
        figure.savefig(path, dpi=110)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark beside those of all."""
    for name, default, meaning in (
        ("--turns", 2, "of each contender"),
        ("--tokens", 96, "of an answer"),
        ("--compared", 96, "length of the prompt whose logits are compared, in tokens"),
        ("--hidden", M10.hidden, "width of the model"),
        ("--layers", M10.layers, "of the model"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{meaning} (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[512, 2000], metavar="N", help="their lengths (default: 512 2000)"
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> BlasReport:
    """Measure. ValueError where there are no two to compare."""
    chosen = blas.look(arguments.blas, arguments.blas_threads)
    if not chosen.matters or arguments.blas == "off" or chosen.advice:
        raise ValueError(f"there is no faster BLAS than MLX's own to compare: {chosen.advice or chosen.name}")
    if min(arguments.turns, arguments.tokens, arguments.compared, *arguments.prompts) < 1:
        raise ValueError("turns and lengths are at least 1")
    size, seed = Size(arguments.hidden, arguments.layers), arguments.seed
    choices = {STOCK: "off", FAST: arguments.blas}
    prompts = Prompts(seed)
    with ExitStack() as stack:
        loops = {
            who: BareLoop(size, seed, stack, blas=choice, blas_threads=arguments.blas_threads, one_core=True)
            for who, choice in choices.items()
        }

        def turn(who: str) -> Turn:
            say(f"{who} ...")
            loop = loops[who]
            prefill = {
                length: length / loop.first_token_s([], prompts.ids(length), CPU_CHUNK_TOKENS)
                for length in arguments.prompts
            }
            return Turn(prefill, loop.decode([prompts.ids(16)], arguments.tokens))

        for loop in loops.values():
            loop.decode([prompts.ids(16)], 4)  # what is done once only
        turns = take_turns({who: partial(turn, who) for who in loops}, arguments.turns, warm=0)
    say("results ...")
    logits = [_logits(choice, arguments.blas_threads, size, seed, arguments.compared) for choice in choices.values()]
    return BlasReport(chosen.name, turns, compare(*logits))


def compare(left: mx.array, right: mx.array) -> Results:
    """Two arrays of logits [L, V]."""
    difference = mx.abs(left - right).max() / mx.abs(left).max()
    agreement = (mx.argmax(left, axis=-1) == mx.argmax(right, axis=-1)).astype(mx.float32).mean()
    return Results(cast("float", difference.item()), cast("float", agreement.item()))


def _logits(choice: str, threads: int, size: Size, seed: int, length: int) -> mx.array:
    """Computed over that BLAS, in a process of its own."""
    with TemporaryDirectory(prefix="bench-blas-") as directory:
        path = str(Path(directory) / "logits.npy")
        words = [sys.executable, "-m", "scripts.tools.bench.blas", choice, str(threads), path]
        subprocess.run([*words, *map(str, (*size, seed, length))], check=True)
        logits = cast("mx.array", mx.load(path))
        mx.eval(logits)
        return logits


def _write_logits(path: str, hidden: str, layers: str, dtype: str, seed: str, length: str) -> None:
    mx.disable_compile()
    model = make_model(Size(int(hidden), int(layers), dtype), int(seed))
    mx.save(path, model(mx.array([Prompts(int(seed)).ids(int(length))]))[0])


if __name__ == "__main__":
    _write_logits(*sys.argv[3:])
