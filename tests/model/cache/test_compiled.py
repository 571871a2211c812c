"""Compiled decode steps: logits, layers and answers are those of plain steps, to the last bit."""

from collections.abc import Iterator
from itertools import accumulate, cycle

import mlx.core as mx
import pytest

from runner.cache.layers.batched import BatchedLayers, arrays_of
from runner.cache.layers.compiled import CompiledSteps, _Columns
from runner.cache.layers.rows import Layout
from scripts.tools.models.architectures import build
from scripts.tools.models.tiny import Tiny, tiny, words
from tests.lib.kernels import in_front
from tests.lib.tiny_engine import BATCHABLE, TinyEngine

pytestmark = pytest.mark.skipif(not in_front(), reason="without kernels, MLX would fuse operations")
_UNCOMPILED = "deepseek_v32"  # its attention reads the buffers by itself
compilable = pytest.mark.parametrize("name", [name for name in BATCHABLE if name != _UNCOMPILED])


def compiled_of(model: Tiny) -> CompiledSteps:
    return CompiledSteps(model.logits, model.logits)


class Pair:
    """Layers of two equal sequences: one steps plainly, the other by compiled steps."""

    def __init__(self, model: Tiny, steps: CompiledSteps, plain: list[object], compiled: list[object]) -> None:
        self.ways = ((model.logits, plain), (steps, compiled))

    def step(self, *tokens: int) -> None:
        plain, compiled = (forward(mx.array(tokens)[:, None], layers) for forward, layers in self.ways)
        mx.eval(plain, compiled, [x for _, layers in self.ways for layer in layers for x in _arrays(layer)])
        assert mx.array_equal(plain, compiled)

    def check_layers(self, rows: int = 1) -> None:
        plain, compiled = ([x[:rows] for layer in layers for x in _arrays(layer)] for _, layers in self.ways)
        assert all(mx.array_equal(*pair) for pair in zip(plain, compiled, strict=True))


def _arrays(layer: object) -> Iterator[mx.array]:
    for each in getattr(layer, "caches", (layer,)):
        yield from arrays_of(each)


def read(model: Tiny, prompt: list[int]) -> list[object]:
    layers = model.make_layers()
    mx.eval(model.logits(mx.array([prompt]), layers))
    return layers


@compilable
def test_steps_are_equal_to_the_last_bit_while_buffers_grow_windows_turn_and_rows_change(name: str) -> None:
    model = tiny(name)
    steps = compiled_of(model)
    for prompt in (words(20), words(41)):  # before and after a window is full
        alone = Pair(model, steps, read(model, prompt), read(model, prompt))
        for token in range(40):
            alone.step(token)
        alone.check_layers()
    before = steps.ran
    rows = [read(model, words(length, length)) for length in (20, 45, 33)]
    plain, compiled = (BatchedLayers(rows[:2]) for _ in range(2))
    together = Pair(model, steps, plain.layers, compiled.layers)
    for token in range(80):
        for each in (plain, compiled):
            if token == 25:
                each.extend([rows[2]])
            if token == 50:
                each.keep([2, 1])
        together.step(*range(token % 60, token % 60 + len(plain)))
    together.check_layers(2)
    assert before >= 60
    assert steps.ran - before >= 50


def test_a_step_writes_into_the_buffers_in_place() -> None:
    model = tiny("gemma3")
    steps, layers = compiled_of(model), read(model, words(900))
    for token in range(8):
        logits = steps(mx.array([[token]]), layers)
        mx.async_eval(logits)
    mx.eval(logits)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(steps(mx.array([[9]]), layers))
    assert steps.ran
    assert mx.get_peak_memory() - before < min(x.nbytes for layer in layers[-1:] for x in _arrays(layer))


def test_what_cannot_be_compiled_is_computed_as_ever() -> None:
    model = tiny(_UNCOMPILED)
    steps = compiled_of(model)
    pair = Pair(model, steps, read(model, words(20)), read(model, words(20)))
    for token in range(8):
        pair.step(token)
    assert not steps.ran
    assert not steps.on


@pytest.mark.parametrize(("length", "window", "seen"), [(20, None, range(16, 21)), (40, 32, range(4, 9))])
def test_a_window_narrower_than_the_layer_shows_its_last_columns(length: int, window: int | None, seen: range) -> None:
    layout = Layout((length,), (0,), 32, window)
    mask = _Columns(mx.array(layout.numbers()), 32, full=layout.full).mask(5)
    assert mask is not None
    assert mx.array_equal(mask[0, 0, 0], mx.array([column in seen for column in range(32)]))


def test_steps_over_long_buffers_are_plain_if_there_is_a_limit() -> None:
    model = tiny("llama")
    ran = []
    for most in (255, 256):
        steps, layers = CompiledSteps(model.logits, model.logits, most), read(model, words(20))
        for token in range(8):
            mx.eval(steps(mx.array([[token]]), layers))
        ran.append(steps.ran)
    assert ran == [0, 4]


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_answers_of_an_engine_are_the_same_and_few_forwards_are_built(name: str) -> None:
    engine = TinyEngine(name)
    steps = engine.parts.step = CompiledSteps(engine.forward, engine.forward)
    for number in range(4):
        engine.ask(words(20 + 9 * number, number), 50)
    engine.finish()
    engine.check()
    assert steps.ran > 2 * sum(length == 1 for _, length in engine.forward.calls)


@pytest.mark.parametrize(("plain_s", "compiled_s", "is_on"), [(2, 1, True), (1, 2, False)])
def test_a_trial_turns_off_compiled_steps_that_take_longer(
    plain_s: int, compiled_s: int, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    steps = compiled_of(model)
    monkeypatch.setattr(
        "runner.cache.layers.compiled.perf_counter", accumulate(cycle((0, plain_s, 0, compiled_s))).__next__
    )
    steps.try_out(model.make_layers, words(16))
    assert steps.on == is_on


def test_a_gpu_without_a_kernel_for_sinks_steps_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.cache.layers.compiled.on_cuda", lambda: True)
    model = build("gpt_oss")
    steps = compiled_of(model)
    alone = Pair(model, steps, read(model, words(20)), read(model, words(20)))
    for token in range(8):
        alone.step(token)
    alone.check_layers()
    assert (steps.on, steps.ran) == (False, 0)
