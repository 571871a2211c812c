"""The model, mlx-lm's caches and a loop, without a server: the limit that others are held against.

Step k+1 is dispatched before token k is read, as in every engine. `python -m scripts.tools.bench.bare_loop` runs
the loop in a process of its own, idle while others are measured: it reads a line of JSON and answers with a number.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter, sleep

from scripts.tools.bench.machine import preload_blas

if __name__ == "__main__":
    preload_blas()

import mlx.core as mx

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__
from runner.device import device
from scripts.tools.bench.llamas import Size, make_model

# isort: split
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache

_REST_S = 0.02


def decode_bare(model: llama.Model, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Greedy tokens per second of all rows together, one row for each prompt, over `tokens` steps after the first.

    Each prompt is read by itself; then the caches of the rows are merged, unless there is one.
    """
    rows = []
    for prompt in prompts:
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([prompt[:-1]]), cache), [layer.state for layer in cache])
        rows.append(cache)
    cache = rows[0] if len(rows) == 1 else [type(layers[0]).merge(layers) for layers in zip(*rows, strict=True)]

    def step(token: mx.array) -> mx.array:
        following = mx.argmax(model(token[:, None], cache)[:, -1, :], axis=-1)
        mx.async_eval(following)
        return following

    token = step(mx.array([prompt[-1] for prompt in prompts]))
    token.tolist()  # the first tokens: from here on it counts
    started = perf_counter()
    for _ in range(tokens):
        following = step(token)
        token.tolist()
        token = following
    token.tolist()
    return tokens * len(prompts) / (perf_counter() - started)


def first_token_s(model: llama.Model, known: Sequence[int], prompt: Sequence[int], chunk: int) -> float:
    """Seconds until the first token after `prompt` is read, in a cache that has seen `known`, `chunk` tokens a time.

    It rests before: a prompt comes to a process that waits for one, on a core that has gone to sleep.
    """
    cache = make_prompt_cache(model)
    _prefill(model, cache, known, chunk)
    sleep(_REST_S)
    started = perf_counter()
    _prefill(model, cache, prompt[:-1], chunk)
    mx.argmax(model(mx.array([prompt[-1:]]), cache)[:, -1, :], axis=-1).item()
    return perf_counter() - started


def _prefill(model: llama.Model, cache: list[KVCache], tokens: Sequence[int], chunk: int) -> None:
    for at in range(0, len(tokens), chunk):
        model(mx.array([tokens[at : at + chunk]]), cache)
        mx.eval([layer.state for layer in cache])


class BareLoop:
    """Such a loop in another process."""

    def __init__(self, size: Size, seed: int, stack: ExitStack, *, cores: int = 0) -> None:
        """It ends with the stack. `cores` is the number of processors that it may use; 0: as many as this process."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.tools.bench.bare_loop", *map(str, size), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the benchmark, which closes the input
            preexec_fn=partial(_keep_to, cores) if cores else None,
        )
        stack.callback(self._process.wait)
        stack.callback(self._process.stdin.close if self._process.stdin else self._process.kill)

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        return self._ask(["decode", prompts, tokens])

    def first_token_s(self, known: Sequence[int], prompt: Sequence[int], chunk: int) -> float:
        return self._ask(["first", known, prompt, chunk])

    def _ask(self, words: list[object]) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def _keep_to(cores: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def _serve(hidden: str, layers: str, dtype: str, bits: str, seed: str) -> None:
    if device() == "cpu":
        mx.disable_compile()  # as the runner does
    model = make_model(Size(int(hidden), int(layers), dtype, int(bits)), int(seed))
    for line in sys.stdin:
        what, *words = json.loads(line)
        print(decode_bare(model, *words) if what == "decode" else first_token_s(model, *words), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
