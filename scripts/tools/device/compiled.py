"""Plain against compiled decode steps: the time of a token, and whether both say the same."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple, cast

import mlx.core as mx

from runner.cache.layers.compiled import CompiledSteps, Forward
from runner.device import device
from scripts.tools.bench.llamas import FIRST_WORD, make_model
from scripts.tools.bench.servers import SIZES
from scripts.tools.device.checks import large
from scripts.tools.device.parts import Row
from scripts.tools.device.served import large_fits, size_here
from scripts.tools.models import architectures
from scripts.tools.models.tiny import words

from mlx_lm.models.cache import make_prompt_cache  # isort: skip

_TOKENS = 50


class _Times(NamedTuple):
    """Milliseconds of a token: in all, and of the processor to build and to dispatch its graph."""

    token: float
    build: float
    dispatch: float


class _Way:
    """An answer, greedy: the next step is dispatched before the present token is read."""

    def __init__(self, forward: Forward, layers: list[object], prompt: list[int]) -> None:
        self._forward, self._layers = forward, layers
        self.tokens, self.times = list[int](), list[_Times]()
        mx.eval(forward(mx.array([prompt[:-1]]), layers))
        self._next = mx.array([prompt[-1:]])
        self.decode(10)
        self.times.clear()

    def decode(self, count: int) -> None:
        for _ in range(count):
            begin, started = time.perf_counter(), time.thread_time()
            drawn = mx.argmax(self._forward(self._next, self._layers)[:, -1:], axis=-1)
            built = time.thread_time()
            mx.async_eval(drawn)
            sent = time.thread_time()
            self.tokens.append(cast("int", self._next.item()))
            self._next = drawn
            times = time.perf_counter() - begin, built - started, sent - built
            self.times.append(_Times(*(1e3 * each for each in times)))
        mx.eval(self._next)


def rows(*, tiny: bool) -> Iterator[Row]:
    """Yields rows for llamas after a short and a long prompt, and for a hybrid. `tiny` chooses what a CPU does in
    seconds."""
    lengths = (60,) if tiny else (300, 4_000)
    for size in ["1M"] if tiny else [size_here(), *["3B"] * large_fits()]:
        yield from _llama_rows(size, lengths)
    hybrid = architectures.build("qwen3_5") if tiny else large("qwen3_5")[0]
    yield from _rows("qwen3_5", hybrid.logits, hybrid.make_layers, words(lengths[0]))


def _llama_rows(size: str, lengths: tuple[int, ...]) -> Iterator[Row]:
    model = make_model(SIZES[size], 1)

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        return model(tokens, cache=layers)  # type: ignore[no-any-return]

    for length in lengths:
        prompt = [FIRST_WORD + each for each in words(length)]
        yield from _rows(f"llama of {size}", forward, lambda: list(make_prompt_cache(model)), prompt)


def _rows(name: str, forward: Forward, make_layers: Callable[[], list[object]], prompt: list[int]) -> Iterator[Row]:
    steps = CompiledSteps(forward, forward)
    ways = [_Way(each, make_layers(), prompt) for each in (forward, steps)]
    for way in ways * 2:
        way.decode(_TOKENS)
    plain, compiled = (_Times(*map(median, zip(*way.times, strict=True))) for way in ways)
    pairs = zip(*(way.tokens for way in ways), strict=True)
    other = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
    found = (
        f"{plain.token:.2f} ms a token, {plain.build:.2f} to build and {plain.dispatch:.2f} to dispatch; compiled"
        f" {compiled.token:.2f}, {compiled.build:.2f} and {compiled.dispatch:.2f}; {steps.ran} steps ran compiled"
    )
    found += "; equal tokens" if other is None else f"; token {other} differs"
    yield Row(f"{name}, {len(prompt)} tokens", found, (other is None or device() == "gpu") and steps.ran > _TOKENS)
