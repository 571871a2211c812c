"""Recurrences by kernels: those of a plain loop in float64 and of mlx-lm, and the same bits wherever tokens are cut."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.model.forwards import replace_forwards
from runner.model.scans import functions
from runner.model.scans.functions import delta_gates, step_gates
from runner.model.scans.kernel import Rule, scan
from scripts.tools.device import scans
from scripts.tools.device.scans import Case
from scripts.tools.models.architectures import build
from tests.lib.kernels import in_front, use
from tests.unit.test_kernels import FLOATS, assert_close, made, wide

pytestmark = pytest.mark.skipif(not in_front(), reason="the kernels are not in front of MLX")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    use(16, 1, 1)
    yield
    use(16)


CASES = [Case(rule, 9, 20, 8, texts=2, heads=4, keys=2) for rule in Rule]
CASES += [replace(case, gates=True) for case in CASES if case.rule is Rule.DELTA]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def same(*pairs: tuple[mx.array, mx.array]) -> bool:
    return all(mx.array_equal(a, b).item() for a, b in pairs)


@pytest.mark.parametrize("columns", [20, 33, 64, 128, 192, 256])
@each_case
def test_a_scan_is_the_recurrence(case: Case, columns: int) -> None:
    for rows, dtype, masked in (
        (5, mx.float32, True),
        (36, mx.float32, False),
        (33, mx.bfloat16, True),
        (4, mx.float16, False),
    ):
        inputs, state, mask = scans.made(replace(case, heads=6, rows=rows, columns=columns, dtype=dtype, masked=masked))
        found = scan(case.rule, inputs, state, mask, mx.float32)
        for one, wanted in zip(found, scans.loop(case.rule, inputs, state, mask), strict=True):
            assert one.dtype == mx.float32
            assert_close(one, wanted, 2e-6)
        rounded, _ = scan(case.rule, inputs, state, mask)
        assert rounded.dtype == dtype
        assert same((rounded, found[0].astype(dtype)))


@each_case
def test_the_bits_are_the_same_wherever_tokens_are_cut_and_with_any_texts_threads_and_layouts(case: Case) -> None:
    for sized in (
        replace(case, tokens=40, rows=38, columns=32),
        replace(case, tokens=40, rows=33, texts=3, heads=3, keys=1),
    ):
        inputs, state, _ = scans.made(sized)
        wanted = scan(case.rule, inputs, state)
        for cut in range(1, 40):
            assert same(*zip(scans.in_parts(sized, [0, cut, 40]), wanted, strict=True)), cut
        for text in range(sized.texts):
            alone = (one[text : text + 1] for one in wanted)
            assert same(*zip(scans.one_text(sized, text), alone, strict=True))
        padded = [mx.concatenate([x[:, :3] * mx.inf, x], axis=1) if x.ndim > 2 else x for x in inputs]
        left, after = scan(case.rule, padded, state, mx.broadcast_to(mx.arange(43) > 2, (sized.texts, 43)))
        assert same((left[:, 3:], wanted[0]), (after, wanted[1]), (left[:, :3], mx.zeros_like(left[:, :3])))
        use(16, 3, 3)
        assert same(*zip(scan(case.rule, inputs, state), wanted, strict=True))
        use(16, 1, 1)
        for layout in LAYOUTS:
            assert same(*zip(scan(case.rule, [layout(x) for x in inputs], layout(state)), wanted, strict=True))


LAYOUTS: Sequence[Callable[[mx.array], mx.array]] = (
    lambda x: mx.concatenate([x, x], axis=-1)[..., : x.shape[-1]],
    lambda x: mx.contiguous(x.swapaxes(-1, 0)).swapaxes(-1, 0),
    lambda x: mx.repeat(x, 2, axis=0)[::2],
    lambda x: mx.contiguous(x.swapaxes(1, -2)).swapaxes(1, -2) if x.ndim > 2 else x,
)
"""Arrays of other strides with the same numbers."""


@each_case
def test_what_is_no_number_stays_in_its_text_head_and_row(case: Case) -> None:
    given, state, _ = scans.made(case)
    inputs = [*given]  # other tests get the list, too
    clean = scan(case.rule, inputs, state)
    values = np.array(inputs[case.rule.values])
    values[1, 4, ..., 3] = np.nan
    inputs[case.rule.values] = mx.array(values)
    y, after = (np.array(x) for x in scan(case.rule, inputs, state))
    touched = np.isnan(y)
    assert touched[1, 4, ..., 3].all()
    assert touched.sum() == touched[1, 4:, ..., 3].sum()
    assert (y == np.array(clean[0]))[~touched].all()
    kept = np.isfinite(after)
    assert (after == np.array(clean[1]))[kept].all()
    assert not kept[1].reshape(-1, 8, after[1].size // values[1, 0].size)[:, 3].any() if values.ndim > 3 else True


def test_a_state_is_updated_in_place_if_nothing_else_has_it() -> None:
    case = Case(Rule.DELTA, 3, 128, 128)
    inputs, state, _ = scans.made(case)
    before = np.array(state)

    def place(x: mx.array) -> Any:
        return np.array(x, copy=False).__array_interface__["data"][0]

    _, after = scan(case.rule, inputs, state)
    mx.eval(after)
    assert (np.array(state) == before).all()
    first = place(after)
    _, after = scan(case.rule, inputs, after)
    mx.eval(after)
    assert place(after) == first


def test_gates_are_those_of_mlx_lm() -> None:
    special = [100.0, -100, mx.inf, -mx.inf, 0, 1e-20, 30, -30]
    for shape, dtype in (
        ((2, 7, 9), "float32"),
        ((1, 70, 8), "bfloat16"),
        ((2, 5, 3, 20), "float32"),
        ((1, 3, 2, 16), "float16"),
    ):
        a, b, bias = made(*shape, dtype=dtype) * 4, made(*shape[:3], seed=1, dtype=dtype), made(*shape[2:], seed=2)
        if shape[2] == 8:
            a[:, 0] = mx.array(special)
        rates = made(*shape[2:3], *[1] * (len(shape) - 3), seed=3)
        given, rate = wide(a) + wide(bias), np.exp(wide(rates))
        steps = np.logaddexp(given, 0)
        with np.errstate(over="ignore", invalid="ignore"):
            decays = {None: np.exp(-rate * steps), -5.0: np.exp(-5 / (1 + np.exp(-rate * given)))}
        for (bound, wanted), negative in zip(decays.items(), (False, True), strict=True):
            g, beta = delta_gates(a, b, rates, bias, bound, negative=negative)
            assert_close(g, wanted, 3e-7)
            assert_close(beta, (1 + negative) / (1 + np.exp(-wide(b))), 3e-7)
        if len(shape) == 4:  # a bias that is the same for all heads
            g, _ = delta_gates(a, b, rates, bias[0], None, negative=False)
            assert_close(g, np.exp(-rate * np.logaddexp(wide(a) + wide(bias[0]), 0)), FLOATS[dtype])
        if len(shape) == 3:
            within = np.clip(steps, 0.01, 20)
            g, dt = step_gates(a, bias, rates, (0.01, 20.0))
            assert_close(g, np.exp(-rate * within), 3e-7)
            assert_close(dt, within, 3e-7)


def compare(name: str, *args: Any, shown: mx.array | None = None, **words: Any) -> None:
    """Compares a function with mlx-lm's own of that name, in the module that has it, over the tokens that are `shown`:
    mlx-lm computes outputs of padding, too."""
    module, _, function = name.partition(".")
    own = getattr(importlib.import_module(f"mlx_lm.models.{module}"), function)
    own = getattr(own, "__wrapped__", own)
    (y, state), (wanted, last) = functions.FUNCTIONS[function](own, *args, **words), own(*args, **words)
    assert y.dtype == state.dtype == mx.float32
    assert_close(y, wide(wanted if shown is None else mx.where(shown[..., None, None], wanted, 0)), 3e-6)
    assert_close(state, wide(last), 3e-6)


@pytest.mark.parametrize("fresh", [True, False])
def test_functions_return_what_mlx_lms_do(fresh: bool) -> None:
    q, k = (made(2, 9, 2, 64, seed=seed) / 8 for seed in (0, 1))
    v, a, b, rates, bias = made(2, 9, 6, 33), made(2, 9, 6), made(2, 9, 6, seed=5), made(6), made(6, seed=4)
    state = None if fresh else made(2, 6, 33, 64)
    for words in ({}, {"allow_neg_eigval": True}, {"lower_bound": -5.0}):
        compare("gated_delta.gated_delta_update", q, k, v, a, b, rates, bias, state, **words)
    wide_a = made(2, 9, 6, 64)
    compare("gated_delta.gated_delta_update", q, k, v, wide_a, b, rates[:, None], made(6, 64), state)
    compare("ssm.ssm_update", v, rates, k, q, bias, a, bias, state, (0.01, 2.0))
    ends = mx.array([9, 4])
    shown = mx.arange(9) < ends[:, None]
    x, keys, queries = (mx.where(shown[..., None, None], each, 0) for each in (v, k, q))
    compare("ssm.ssm_update", x, rates, keys, queries, bias, a, bias, state, mask=shown, lengths=ends, shown=shown)
    swapped = [each.swapaxes(1, 2) for each in (mx.repeat(q, 3, axis=2), mx.repeat(k, 3, axis=2), v)]
    h = None if fresh else made(2, 6, 64, 33)
    compare("bailing_hybrid.recurrent_gla", *swapped, -mx.abs(rates) / 2, scale=0.3, h=h)
    compare("bailing_moe_linear.recurrent_gla", *swapped, -mx.abs(rates) / 2, scale=0.3, h=h)
    compare("recurrent_gemma.rnn_scan", v[:, :, 0], mx.sigmoid(v[:, :, 1]), None if fresh else made(2, 33))


def test_lengths_end_texts_without_a_mask() -> None:
    x, key, dt, rates = made(2, 9, 4, 8), made(2, 9, 1, 16), made(2, 9, 4), made(4)
    own = importlib.import_module("mlx_lm.models.ssm").ssm_update
    state = made(2, 4, 8, 16)
    y, after = functions.ssm_update(own, x, rates, key, key, rates, dt, rates, state, lengths=mx.array([9, -2]))
    assert same((after[1], state[1]), (y[1], mx.zeros_like(y[1])))
    assert not same((after[0], state[0]))


def test_no_tokens_leave_the_state() -> None:
    for case in CASES:
        inputs, state, _ = scans.made(case)
        y, after = scan(case.rule, scans.part(inputs, scans.ALL, slice(0)), state)
        assert y.shape[1] == 0
        assert same((after, state))


@pytest.mark.parametrize("name", ["mamba", "jamba", "rwkv7", "qwen3_5", "kimi_linear", "recurrent_gemma"])
def test_models_compute_what_they_do_without_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    tokens = mx.array([[token * 7 % 64 for token in range(12)]])

    def logits() -> mx.array:
        layers = model.make_layers()
        return mx.concatenate([model.logits(tokens[:, :7], layers), model.logits(tokens[:, 7:], layers)], axis=1)

    found = logits()
    mx.eval(found)
    monkeypatch.setattr(functions, "available", lambda *_, **__: False)
    assert_close(found, wide(logits()), 2e-5)


def test_loops_are_replaced_once_also_where_a_module_takes_them_from_another() -> None:
    package = "mlx_lm.models."
    for name in ("qwen3_5_moe", "falcon_h1"):
        importlib.import_module(package + name)
    for _ in range(2):
        replace_forwards()
    for name, function in (("qwen3_5", "gated_delta_update"), ("falcon_h1", "ssm_update")):
        replaced = getattr(importlib.import_module(package + name), function)
        assert replaced.__wrapped__.__module__ == package + ("ssm" if function == "ssm_update" else "gated_delta")
        assert not hasattr(replaced.__wrapped__, "__wrapped__")
