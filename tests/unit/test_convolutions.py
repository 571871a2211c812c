"""Convolutions of single channels are sums of their taps, the same for any cut, batch and number of threads."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.lib.kernels import calls, use
from tests.unit.test_kernels import LAYOUTS, _one_thread, assert_as_mlx, assert_close, by_kernels, by_mlx, made, wide

__all__ = ["_one_thread"]


def convolved(x: mx.array, weight: mx.array, dilation: int = 1, bias: mx.array | None = None) -> mx.array:
    y = mx.conv1d(x, weight, dilation=dilation, groups=x.shape[-1])
    return y if bias is None else y + bias


def with_silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


@pytest.mark.parametrize("taps", range(2, 9))
@pytest.mark.parametrize("dilation", [1, 3])
def test_a_convolution_is_the_sum_of_its_taps(taps: int, dilation: int) -> None:
    for channels in (16, 33, 200):
        x, weight, bias = made(2, 40, channels), made(channels, taps, 1, seed=1), made(channels, seed=2)
        rows = 40 - (taps - 1) * dilation
        wanted = sum(wide(x[:, t * dilation :][:, :rows]) * wide(weight[:, t, 0]) for t in range(taps)) + np.zeros(1)
        assert_close(by_kernels(partial(convolved, x, weight, dilation)), wanted, 1e-6)
        with_bias = wanted + wide(bias)
        assert_close(convolved(x, weight, dilation, bias), with_bias, 1e-6)
        silu = by_kernels(lambda: with_silu(convolved(x, weight, dilation, bias)))  # noqa: B023  called at once
        assert_close(silu, with_bias / (1 + np.exp(-with_bias)), 1e-6)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "four axes"])
def test_a_convolution_reads_rows_that_lie_anywhere(layout: str) -> None:
    x = LAYOUTS[layout](made(30, 48)).reshape(1, 30, 48)
    assert_as_mlx(partial(convolved, x, made(48, 4, 1, seed=1), bias=made(48, seed=2)), 1e-6)
    state = made(1, 3, 48, seed=3)
    assert mx.array_equal(
        by_kernels(lambda: convolved(mx.concatenate([state, x], axis=1), made(48, 4, 1))),
        convolved(mx.array(np.concatenate([state, x], axis=1)), made(48, 4, 1)),
    )
    turned = LAYOUTS[layout](made(48, 4, seed=1)).reshape(48, 4, 1)
    assert_as_mlx(partial(mx.conv_general, made(30, 3, 48).swapaxes(0, 1), turned, groups=48), 1e-6)


def test_a_row_is_the_same_wherever_a_prompt_is_cut_in_any_batch_and_on_any_number_of_threads() -> None:
    taps, channels = 4, 600
    x, weight, bias = made(5, 90, channels), made(channels, taps, 1, seed=1), made(channels, seed=2)
    whole = with_silu(convolved(x, weight, 1, bias))
    for threads, step in product((1, 3), (1, 7, 16, 50, 90)):
        use(16, threads, threads)
        for some in (x, x[2:3]):
            state, parts = some[:, : taps - 1], []
            for begin in range(taps - 1, 90, step):
                joined = mx.concatenate([state, some[:, begin : begin + step]], axis=1)
                parts.append(with_silu(convolved(joined, weight, 1, bias)))
                state = joined[:, 1 - taps :]
            assert mx.array_equal(mx.concatenate(parts, axis=1), whole if some is x else whole[2:3])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_beyond_all_others_stays_in_its_channel_and_its_taps(number: float) -> None:
    x, weight = made(2, 30, 40), made(40, 4, 1, seed=1)
    clean = with_silu(convolved(x, weight))
    reached = np.zeros(clean.shape, bool)
    reached[1, 7:11, 39] = True
    x[1, 10, 39] = number
    found = np.array(with_silu(convolved(x, weight)))
    assert np.array_equal(found[~reached], np.array(clean)[~reached])
    assert not np.isfinite(found[reached]).any()


ROWS: dict[str, Callable[[mx.array], mx.array]] = {
    "the last": lambda x: x[:, -3:],
    "the last, by places": lambda x: mx.contiguous(x[:, x.shape[1] - 3 :, :]),
    "one of the last": lambda x: x[:, -3:][:, 1:2],
    "some in the middle": lambda x: x[:, 2:5],
    "the first": lambda x: mx.contiguous(x[:, :2]),
    "all": lambda x: x[:, :60],
    "none": lambda x: x[:, 70:],
    "every other": lambda x: x[:, -4::2],
    "some of all texts": lambda x: x[1:, -3:],
    "some channels": lambda x: x[:, -3:, 4:],
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("texts", [1, 2])
def test_rows_of_joined_ones_are_those_of_the_arrays(name: str, texts: int) -> None:
    for tokens, layout in product((1, 2, 60), LAYOUTS):
        x = LAYOUTS[layout](made(texts * tokens, 32)).reshape(texts, tokens, 32)
        state = made(texts, 3, 32, seed=1)
        wanted = ROWS[name](mx.array(np.concatenate([state, x], axis=1)))
        joined = mx.concatenate([state, x], axis=1)
        assert mx.array_equal(ROWS[name](joined), wanted)
        mx.eval(joined)
        assert mx.array_equal(ROWS[name](joined), wanted)


@pytest.mark.parametrize("tokens", [1, 500])
def test_a_state_and_a_convolution_need_no_joined_rows_and_the_state_keeps_none(tokens: int) -> None:
    state, weight = made(1, 3, 64), made(64, 4, 1, seed=1)
    mx.eval(state, weight)
    started, counted = calls(), mx.get_active_memory()
    joined = mx.concatenate([state, made(1, tokens, 64, seed=2)], axis=1)
    kept, y = mx.contiguous(joined[:, -3:, :]), convolved(joined, weight)
    del joined
    mx.eval(kept, y)
    assert calls() == started + 2
    del y
    assert mx.get_active_memory() - counted < 2 * kept.nbytes


@pytest.mark.parametrize("tokens", [1, 40])
def test_bias_and_silu_are_computed_with_it_to_the_same_bits(tokens: int) -> None:
    x, weight, bias = made(2, tokens + 3, 40), made(40, 4, 1, seed=1), made(40, seed=2)
    before = calls()
    fused = with_silu(convolved(x, weight, 1, bias))
    mx.eval(fused)
    assert calls() == before + 1
    plain = convolved(x, weight)
    mx.eval(plain)  # as numbers, they have no operation that could be looked at
    added = plain + bias
    mx.eval(added)
    assert mx.array_equal(fused, with_silu(added))
    both = convolved(x, weight, 1, bias)
    silu = with_silu(both)
    mx.eval(both, silu)
    assert mx.array_equal(both, added)
    assert mx.array_equal(silu, fused)


def test_gradients_are_those_of_mlx() -> None:
    def loss(x: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
        return with_silu(convolved(x, weight, 1, bias)).square().mean()

    gradient = mx.grad(loss, argnums=(0, 1, 2))
    inputs = made(2, 9, 20), made(20, 4, 1, seed=1), made(20, seed=2)
    for found, wanted in zip(gradient(*inputs), by_mlx(lambda: gradient(*inputs)), strict=True):
        assert_close(found, wide(wanted), 1e-5)


X, WEIGHT = made(1, 9, 32), made(32, 4, 1, seed=1)
OTHERS: dict[str, Callable[[], mx.array]] = {
    "halves": lambda: mx.conv1d(X.astype(mx.float16), WEIGHT.astype(mx.float16), groups=32),
    "steps": lambda: mx.conv1d(X, WEIGHT, stride=2, groups=32),
    "padding": lambda: mx.conv1d(X, WEIGHT, padding=1, groups=32),
    "groups of channels": lambda: mx.conv1d(X, made(32, 4, 2), groups=16),
    "more outputs than channels": lambda: mx.conv1d(X, made(64, 4, 1), groups=32),
    "one tap": lambda: mx.conv1d(X, made(32, 1, 1), groups=32),
    "nine taps": lambda: mx.conv1d(X, made(32, 9, 1), groups=32),
    "few channels": lambda: mx.conv1d(X[..., :15], WEIGHT[:15], groups=15),
    "pictures": lambda: mx.conv_general(X[:, None], WEIGHT[:, None], groups=32),
    "a turned kernel": lambda: mx.conv_general(X, WEIGHT, groups=32, flip=True),
    "padding behind": lambda: mx.conv_general(X, WEIGHT, padding=([0], [1]), groups=32),
    "padding before": lambda: mx.conv_general(X, WEIGHT, padding=([1], [0]), groups=32),
    "spread rows": lambda: mx.conv_general(X, WEIGHT, input_dilation=2, groups=32),
    "spread taps": lambda: mx.conv_general(X, WEIGHT, kernel_dilation=2, groups=32),
    "general steps": lambda: mx.conv_general(X, WEIGHT, stride=2, groups=32),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_convolutions_are_left_to_mlx(case: str) -> None:
    before = calls()
    found = OTHERS[case]()
    mx.eval(found)
    assert calls() == before
    assert mx.allclose(found, by_mlx(OTHERS[case]), atol=1e-5)


@pytest.mark.parametrize("words", [{"dilation": 0}, {"dilation": 3}, {"groups": 3}, {"stride": 0}])
def test_a_convolution_that_cannot_be_is_refused_as_by_mlx(words: dict[str, Any]) -> None:
    def refusal() -> str:
        with pytest.raises(ValueError, match=r"\[conv\]") as error:
            mx.conv1d(X, WEIGHT, **{"groups": 32} | words)
        return str(error.value)

    found = refusal()
    use(0)
    assert refusal() == found
