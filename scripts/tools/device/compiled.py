"""The time of a token, plain and by compiled steps: `python -m scripts.tools.device.compiled`. `--tiny` runs anywhere."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

from runner import cpu

cpu.preload()

import mlx.core as mx  # noqa: E402 - the kernels must be loaded before MLX

from runner.cache.layers import compiled  # noqa: E402
from runner.cache.layers.compiled import CompiledSteps, attend_on_cuda  # noqa: E402
from runner.device import device, use_on_cuda  # noqa: E402
from scripts.tools.bench.llamas import B3, FIRST_WORD, M1, M700, make_model  # noqa: E402
from scripts.tools.device.checks import Row, large  # noqa: E402
from scripts.tools.models import architectures  # noqa: E402
from scripts.tools.models.tiny import Tiny, words  # noqa: E402

from mlx_lm.models.cache import make_prompt_cache  # isort: skip # noqa: E402

_TOKENS, _WARM = 50, 6
_PROMPT, _LONG = 300, 4_000

Forward = Callable[[mx.array, list[object]], mx.array]


@contextmanager
def unfused() -> Iterator[None]:
    """A block in which a CPU records graphs without fusing kernels; a GPU fuses them."""
    if device() == "gpu":
        yield
        return
    set_mode = ctypes.CDLL("libmlx.so")._ZN3mlx4core16set_compile_modeENS0_11CompileModeE
    set_mode(2)
    try:
        yield
    finally:
        set_mode(0)


class Times(NamedTuple):
    """Milliseconds: of a token, of building its graph, and of the dispatch."""

    token: float
    build: float
    dispatch: float


class Way:
    """A way to decode, with its own layers."""

    def __init__(self, forward: Forward, layers: list[object], prompt: list[int], scatter: bool = False) -> None:
        self.forward, self.layers, self.scatter = forward, layers, scatter
        self.tokens: list[int] = []
        self.times: list[Times] = []
        mx.eval(forward(mx.array([prompt[:-1]]), layers))
        self.next = mx.array([prompt[-1:]])
        self.decode(_WARM)
        self.times = []

    def decode(self, count: int) -> None:
        compiled._Entries.scatter = self.scatter
        for _ in range(count):
            begin, started = time.perf_counter(), time.thread_time()
            drawn = mx.argmax(self.forward(self.next, self.layers)[:, -1:], axis=-1)
            built = time.thread_time()
            mx.async_eval(drawn)
            sent = time.thread_time()
            self.tokens.append(int(self.next.item()))
            self.next = drawn
            self.times.append(
                Times(*(1e3 * each for each in (time.perf_counter() - begin, built - started, sent - built)))
            )

    def found(self) -> Times:
        return Times(*map(median, zip(*self.times, strict=True)))


def decoded(
    name: str, forward: Forward, make_layers: Callable[[], list[object]], length: int, first: int
) -> Iterator[Row]:
    """Yields rows about a model after a prompt of `length` tokens."""
    prompt = [first + each for each in words(length)]
    gpu = device() == "gpu"
    ways = {"plain": Way(forward, make_layers(), prompt)}
    kinds = {"slices, masks": (False, None), "scatter, masks": (True, None)}
    if gpu and not mx.metal.is_available():
        kinds |= {"slices, kernel": (False, attend_on_cuda), "scatter, kernel": (True, attend_on_cuda)}
    for kind, (scatter, attend) in kinds.items():
        begin = time.perf_counter()
        try:
            steps = CompiledSteps(forward, compiling=unfused, attend=attend)
            ways[kind] = Way(steps, make_layers(), prompt, scatter)
        except Exception as error:
            yield Row(f"{name}, {kind}", f"{type(error).__name__}: {str(error)[:300]}", good=False)
            continue
        yield Row(f"{name}, {kind}", f"{steps.traced} traces, first tokens {time.perf_counter() - begin:.1f} s")
    for _ in range(2):
        for way in ways.values():
            way.decode(_TOKENS)
            mx.eval(way.next)
    base = ways["plain"]
    for kind, way in ways.items():
        same = next((i for i, pair in enumerate(zip(way.tokens, base.tokens, strict=True)) if len({*pair}) > 1), None)
        equal = "equal tokens" if same is None else f"the first other token is number {same} of {len(way.tokens)}"
        times = "{:.2f} ms a token, {:.2f} to build, {:.2f} to dispatch".format(*way.found())
        yield Row(f"{name}, {length} tokens, {kind}", f"{times}; {equal}", same is None)
    yield Row(
        f"{name}, logits",
        _nearness(forward, make_layers, prompt, attend_on_cuda if "scatter, kernel" in ways else None),
    )


def _nearness(
    forward: Forward, make_layers: Callable[[], list[object]], prompt: list[int], attend: Callable[..., mx.array] | None
) -> str:
    compiled._Entries.scatter = True
    found = []
    for each in (forward, CompiledSteps(forward, compiling=unfused, attend=attend)):
        layers = make_layers()
        mx.eval(forward(mx.array([prompt]), layers))
        for token in prompt[:3]:
            logits = each(mx.array([[token]]), layers)
            mx.eval(logits)
        found.append(logits.astype(mx.float32))
    away = mx.abs(found[0] - found[1]).max() / mx.abs(found[0]).max()
    return f"{float(away):.1e} of the largest away after three tokens"


def rows(*, tiny: bool) -> Iterator[Row]:
    """Yields the rows of all models."""
    if device() == "cpu":
        mx.disable_compile()
    elif not mx.metal.is_available():
        use_on_cuda()
    short = "--short" in sys.argv
    sizes = (
        {"llama of 0.7 B": M700}
        if short
        else {"llama of 1 M": M1}
        if tiny
        else {"llama of 0.7 B": M700, "llama of 2.8 B": B3}
    )
    for name, size in sizes.items():
        begin = time.perf_counter()
        model = make_model(size, 1)
        yield Row(name, f"made in {time.perf_counter() - begin:.1f} s")
        forward: Forward = lambda tokens, layers, model=model: model(tokens, cache=layers)
        for length in (60,) if tiny else (_PROMPT,) if short else (_PROMPT, _LONG):
            yield from decoded(name, forward, lambda model=model: list(make_prompt_cache(model)), length, FIRST_WORD)
        del model, forward
    if short:
        return
    hybrid: Tiny = architectures.build("qwen3_5") if tiny else large("qwen3_5")[0]
    yield from decoded("qwen3_5", hybrid.logits, hybrid.make_layers, 60 if tiny else _PROMPT, 0)
    for name in ("MLX_MAX_OPS_PER_BUFFER",) if device() == "gpu" and not tiny else ():
        words_ = [sys.executable, "-m", "scripts.tools.device.compiled", "--short"]
        for value in ("20", "100", "400"):
            env = {**os.environ, name: value, "MLX_MAX_MB_PER_BUFFER": "4000"}
            done = subprocess.run(words_, env=env, capture_output=True, text=True, timeout=60)
            for line in (done.stdout + done.stderr[-300:]).splitlines():
                if "ms a token" in line or done.returncode:
                    yield Row(f"{name}={value}, 4000 MB", line)


if __name__ == "__main__":
    start = time.monotonic()
    for row in rows(tiny="--tiny" in sys.argv):
        print(f"{time.monotonic() - start:5.0f} s  {'' if row.good else 'WRONG  '}{row.name}: {row.found}", flush=True)
