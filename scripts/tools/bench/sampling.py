"""What each sampling feature adds to a decode step: bare argmax and the sampler in turns, on random-weight Llamas; and
what the sampling of several rows in one go takes, against as many samplers that draw alone.

Machines that others use are noisy, so blocks of a few steps alternate (A B, B A, ...), each pair gives one ratio, and
the table shows the median and the quartiles of the ratios, of the wall time and of the CPU time of the process (the
steadier one: it does not count waiting for others). Exit status 1 if one feature alone adds more than 10 % of wall time
to a step of the small-vocabulary model, the benchmark model.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import NamedTuple

from runner import blas

BLAS = blas.preload("auto", 1)

import mlx.core as mx  # noqa: E402 - the fast BLAS must be loaded first
from mlx.utils import tree_reduce  # noqa: E402

import runner.process.lean_mlx_lm  # noqa: E402, F401 - registers mlx_lm without its package __init__
from runner.sampling import SamplingOptions  # noqa: E402
from runner.sampling.sample import Sample  # noqa: E402
from runner.sampling.sampler import Sampler, SamplerBatch  # noqa: E402

# isort: split
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

VOCABULARIES = (4096, 32768)
BATCH_VOCABULARIES = (4096, 32768, 131072)
BATCH_ROWS = 8
CONTEXT = 4096
PROMPT = [7 + 13 * index for index in range(128)]
LIMIT_PERCENT = 10.0

ALONE = {
    "greedy": SamplingOptions(),
    "repeat penalty": SamplingOptions(repeat_penalty=1.1, repeat_last_n=64),
    "repeat penalty, all tokens": SamplingOptions(repeat_penalty=1.1, repeat_last_n=-1),
    "presence penalty": SamplingOptions(presence_penalty=0.5, repeat_last_n=64),
    "frequency penalty": SamplingOptions(frequency_penalty=0.5, repeat_last_n=64),
    "temperature": SamplingOptions(temperature=0.8),
    "top-k 40": SamplingOptions(temperature=0.8, top_k=40),
    "top-p 0.9": SamplingOptions(temperature=0.8, top_p=0.9),
    "min-p 0.05": SamplingOptions(temperature=0.8, min_p=0.05),
}
FILTERS = SamplingOptions(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05)
TOGETHER = {
    "the three filters": FILTERS,
    "Ollama's defaults": SamplingOptions(
        temperature=0.8, top_k=40, top_p=0.9, repeat_penalty=1.1, repeat_last_n=64, seed=0
    ),
    "logprobs, 5 alternatives": SamplingOptions(logprobs=True, top_logprobs=5),
}

Step = Callable[[mx.array], tuple[mx.array, list[mx.array]]]
"""Logits [1, V] to the token [1] and everything to evaluate."""


class Seconds(NamedTuple):
    """Of one decode step."""

    wall: float
    cpu: float


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of blocks for each feature (default 40)")
    parser.add_argument("--steps", type=int, default=12, help="decode steps in a block (default 12)")
    options = parser.parse_args(argv)
    mx.disable_compile()
    print("BLAS:", BLAS)
    too_slow = []
    for vocabulary in VOCABULARIES:
        bench = Bench(vocabulary, options.steps)
        bare = bench.bare()
        print(f"\n{bench.parameters / 1e6:.1f} M parameters, vocabulary {vocabulary}, ", end="")
        print(f"bare step {1e3 * bare.wall:.2f} ms, {1e3 * bare.cpu:.2f} ms of CPU time")
        print(f"{'':<28}{'wall +%':>9}{'quartiles':>15}{'CPU +%':>11}{'quartiles':>15}")
        for name, wish in (ALONE | TOGETHER).items():
            wall, cpu = bench.added_percent(wish, options.pairs)
            print(f"{name:<28}{_row(wall)}  {_row(cpu)}", flush=True)
            if vocabulary == VOCABULARIES[0] and name in ALONE and median(wall) > LIMIT_PERCENT:
                too_slow.append(name)
    print(f"\nmicroseconds for {BATCH_ROWS} rows, without a model")
    print(f"{'vocabulary':<12}{'options':<20}{'alone':>9}{'together':>10}")
    for vocabulary in BATCH_VOCABULARIES:
        for name in ("greedy", "Ollama's defaults"):
            alone, together = batch_seconds(vocabulary, (ALONE | TOGETHER)[name], options.steps)
            print(f"{vocabulary:<12}{name:<20}{1e6 * alone:>9.0f}{1e6 * together:>10.0f}", flush=True)
    if too_slow:
        print(f"\nmore than {LIMIT_PERCENT:.0f} % of a step: {', '.join(too_slow)}")
    return 1 if too_slow else 0


def _row(percents: list[float]) -> str:
    low, _, high = quantiles(percents, n=4)
    return f"{median(percents):>9.1f}{low:>8.1f}{high:>7.1f}"


class Bench:
    """One model and its cache, brought back to the same prompt after every block of steps."""

    def __init__(self, vocabulary: int, steps: int) -> None:
        self._vocabulary = vocabulary
        self._steps = steps
        self._model = new_model(vocabulary)
        self.parameters: int = tree_reduce(lambda total, weight: total + weight.size, self._model.parameters(), 0)
        self._cache = make_prompt_cache(self._model)
        mx.eval(self._model(mx.array([PROMPT]), self._cache))

    def bare(self) -> Seconds:
        """A step of plain argmax: the medians of some blocks."""
        blocks = [self._block(_argmax) for _ in range(10)]
        return Seconds(median(block.wall for block in blocks), median(block.cpu for block in blocks))

    def added_percent(self, wish: SamplingOptions, pairs: int) -> tuple[list[float], list[float]]:
        """How much longer than plain argmax a step takes with the sampler, for each pair: wall time, CPU time."""
        wall, cpu = [], []
        for pair in range(pairs):
            if pair % 2:
                sampled, bare = self._block(self._sampler(wish)), self._block(_argmax)
            else:
                bare, sampled = self._block(_argmax), self._block(self._sampler(wish))
            wall.append(100 * (sampled.wall / bare.wall - 1))
            cpu.append(100 * (sampled.cpu / bare.cpu - 1))
        return wall, cpu

    def _block(self, choose: Step) -> Seconds:
        # As the engine does it: step k+1 is dispatched before token k is read.
        wall, cpu = [], []
        token = self._step(choose, mx.array([1]))
        for _ in range(self._steps):
            wall_started, cpu_started = time.perf_counter(), time.process_time()
            following = self._step(choose, token)
            token.item()
            wall.append(time.perf_counter() - wall_started)
            cpu.append(time.process_time() - cpu_started)
            token = following
        mx.eval(token)
        for layer in self._cache:
            layer.trim(layer.offset - len(PROMPT))
        return Seconds(median(wall), median(cpu))

    def _step(self, choose: Step, token: mx.array) -> mx.array:
        following, arrays = choose(self._model(token[:, None], self._cache)[:, -1, :])
        mx.async_eval(*arrays)
        return following

    def _sampler(self, wish: SamplingOptions) -> Step:
        sampler = Sampler(wish, PROMPT, self._vocabulary, CONTEXT)

        def choose(logits: mx.array) -> tuple[mx.array, list[mx.array]]:
            sample = sampler(logits)
            return sample.token, sample.arrays()

        return choose


def batch_seconds(vocabulary: int, wish: SamplingOptions, steps: int) -> tuple[float, float]:
    """Seconds for one step of all rows, by samplers that draw alone and by a batch: medians of blocks in turns."""
    logits = mx.random.normal((BATCH_ROWS, vocabulary)) * 3
    rows = [mx.array(row) for row in logits.split(BATCH_ROWS)]
    mx.eval(logits, rows)
    alone, together = ([Sampler(wish, PROMPT, vocabulary, CONTEXT) for _ in rows] for _ in range(2))
    batch = SamplerBatch(together)
    draws = (lambda: [sampler(row) for sampler, row in zip(alone, rows, strict=True)], lambda: [batch(logits)])
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(10):
        for draw, taken in zip(draws, seconds, strict=True):
            taken += _drawing(draw, steps)
    return median(seconds[0]), median(seconds[1])


def _drawing(draw: Callable[[], list[Sample]], steps: int) -> list[float]:
    seconds = []
    samples = draw()
    for _ in range(steps):
        started = time.perf_counter()
        following = draw()
        mx.async_eval([array for sample in following for array in sample.arrays()])
        for sample in samples:
            sample.read()
        samples = following
        seconds.append(time.perf_counter() - started)
    return seconds


def _argmax(logits: mx.array) -> tuple[mx.array, list[mx.array]]:
    token = mx.argmax(logits, axis=-1)
    return token, [token]


def new_model(vocabulary: int) -> llama.Model:
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=384,
            num_hidden_layers=6,
            intermediate_size=1024,
            num_attention_heads=6,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=vocabulary,
            tie_word_embeddings=True,
        )
    )
    mx.eval(model.parameters())
    return model


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
