"""The kernels choose experts, weigh them and compute them as MLX does, in few operations."""

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import silu
from mlx_lm.models import phimoe
from mlx_lm.models.activations import swiglu, swiglu_oai

from runner.model.forwards import sparsemixer
from tests.lib.kernels import calls, use
from tests.unit.test_kernels import PACKINGS, Packing, assert_close, by_kernels, by_mlx, made, wide

EXPERTS, CHOSEN, WIDTH = 6, 3, 256
BIAS = made(EXPERTS, seed=9)
Form = Callable[[mx.array], mx.array]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    use(16, 1, 1)
    yield
    use(16)


def first(keys: mx.array) -> mx.array:
    return mx.stop_gradient(mx.argpartition(keys, kth=CHOSEN - 1, axis=-1)[..., :CHOSEN])


def last(keys: mx.array) -> mx.array:
    return mx.argpartition(keys, kth=-CHOSEN, axis=-1)[..., -CHOSEN:]


CHOICES: dict[str, Form] = {
    "the largest": last,
    "the smallest": first,
    "the largest first": lambda x: first(-x),
    "probabilities": lambda x: first(-mx.softmax(x, axis=-1)),
    "with a bias": lambda x: first(-(mx.sigmoid(x) + BIAS)),
    "with a bias, the largest": lambda x: last(mx.sigmoid(x) + BIAS),
    "all": lambda x: mx.argpartition(x, kth=2, axis=-1),
    "by columns": lambda x: mx.argpartition(x, kth=2, axis=1)[:, :1],
    "every other": lambda x: mx.argpartition(x, kth=2, axis=-1)[..., ::2],
    "of some rows": lambda x: mx.argpartition(x, kth=2, axis=-1)[1:, -3:],
    "with a bias of each": lambda x: first(-(mx.sigmoid(x) + 2 * x)),
}
"""Ways to choose experts."""
AT_ONCE = {*CHOICES} - {"probabilities", "by columns", "every other", "of some rows", "with a bias of each"}
"""Those that are one operation."""


@pytest.mark.parametrize("form", CHOICES)
def test_a_choice_is_that_of_mlx(form: str) -> None:
    x = made(40, 2, EXPERTS).swapaxes(0, 1)
    x[0, :9] = mx.round(x[0, :9])  # some are equal
    x[1, 3, 2], x[1, 4, :] = mx.nan, mx.inf
    mx.eval(x)
    before = calls()
    found = by_kernels(lambda: CHOICES[form](x)) if form != "by columns" else CHOICES[form](x)
    assert form not in AT_ONCE or calls() == before + 1
    assert mx.array_equal(found, by_mlx(lambda: CHOICES[form](x)))


def test_phi_moe_chooses_as_in_mlx_lm_in_one_operation() -> None:
    own = getattr(phimoe.sparsemixer, "__wrapped__", phimoe.sparsemixer)
    gates = mx.concatenate([x := made(99, 11), mx.round(x), 1 + x / 50, mx.array([[mx.nan] + [1] * 10])])
    mx.eval(gates)
    before, found = calls(), sparsemixer(own, gates, top_k=3, jitter_eps=0.01)
    mx.eval(found)
    assert calls() == before + 1
    for one, other in zip(found, own(gates, top_k=3, jitter_eps=0.01), strict=True):
        np.testing.assert_allclose(wide(one), wide(other), rtol=1e-6)


NUMBERS: dict[str, Form] = {
    "alone": lambda y: y,
    "softmax": lambda y: mx.softmax(y, axis=-1, precise=True),
    "sum": lambda y: y.sum(axis=-1, keepdims=True),
    "shares": lambda y: y / y.sum(axis=-1, keepdims=True),
    "shares of more, times a factor": lambda y: 2.5 * (y / (mx.sum(y, axis=2, keepdims=True) + 1e-20)),
    "shares of one number at least": lambda y: y / mx.maximum(y.sum(axis=-1, keepdims=True), 1e-12),
}
"""Functions of chosen numbers that are one operation with the choice of them."""


@pytest.mark.parametrize("form", NUMBERS)
@pytest.mark.parametrize("function", [None, mx.sigmoid], ids=["of numbers", "of a function"])
def test_chosen_numbers_and_what_follows_are_one_operation(form: str, function: Form | None) -> None:
    x = abs(made(2, 40, EXPERTS).swapaxes(0, 1))
    x[3, 1, 2] = mx.nan

    def compute() -> mx.array:
        numbers = x if function is None else function(x)
        return NUMBERS[form](mx.take_along_axis(numbers, last(numbers), axis=-1))

    mx.eval(x)
    before = calls()
    found = by_kernels(compute)
    assert calls() == before + 2
    wanted = by_mlx(compute)
    assert np.allclose(found, wanted, rtol=1e-6, equal_nan=True)
    assert mx.isnan(found).any(axis=-1).sum() == mx.isnan(wanted).any(axis=-1).sum() > 0


def test_numbers_divided_by_the_sum_of_others_stay_so() -> None:
    x = abs(made(5, EXPERTS))

    def compute() -> mx.array:
        one, other = (mx.take_along_axis(x, choose(x), axis=-1) for choose in (first, last))
        return one / other.sum(axis=-1, keepdims=True)

    assert np.allclose(by_kernels(compute), by_mlx(compute), rtol=1e-6)


GATES: dict[str, tuple[Callable[[mx.array, mx.array], mx.array], bool]] = {
    "swiglu": (swiglu, False),
    "swiglu of both": (lambda gate, x: silu(gate) * (x + 1), False),
    "of GPT-OSS, with biases": (swiglu_oai, True),
}
"""The function of two products, and True if each has a bias."""


class Experts:
    """Layers of experts as mlx-lm computes them. Evaluates each step by itself with `settle` = mx.eval."""

    def __init__(self, packing: Packing, gate: str) -> None:
        self.packing, (self.gate, self.biased) = packing, GATES[gate]
        self.layers = [packing.of(made(EXPERTS, WIDTH, WIDTH, seed=seed)) for seed in range(3)]
        self.biases = [made(EXPERTS, WIDTH, seed=seed) for seed in range(3)]
        mx.eval(self.layers, self.biases)

    def __call__(
        self,
        x: mx.array,
        experts: mx.array,
        weights: mx.array,
        after: Form = lambda y: y,
        settle: Callable[..., None] = lambda *_: None,
    ) -> mx.array:
        def multiply(place: int, x: mx.array) -> mx.array:
            y = self.packing.gathered(x, self.layers[place], experts)
            settle(y)
            y = y + mx.expand_dims(self.biases[place][experts], -2) if self.biased else y
            settle(y)
            return y

        x = mx.expand_dims(x, (-2, -3))
        settle(x)
        x = self.gate(multiply(0, x), multiply(1, x))
        settle(x)
        y = multiply(2, x).squeeze(-2)
        settle(y)
        y = (y * weights[..., None]).sum(axis=-2)
        settle(y)
        return after(y)


@pytest.mark.parametrize("packing", [PACKINGS[7], PACKINGS[18]], ids=str)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (1, 60)], ids=str)
def test_experts_are_two_operations_up_to_their_weighted_sum(
    packing: Packing, gate: str, shape: tuple[int, int]
) -> None:
    layers = Experts(packing, gate)
    experts = mx.array(np.random.default_rng(2).integers(0, EXPERTS, (*shape, CHOSEN)).astype(np.uint32))
    x, residual = made(*shape, WIDTH, seed=4), made(*shape, WIDTH, seed=6)
    weights = abs(made(CHOSEN, *shape, seed=5)).transpose(1, 2, 0)
    shared, rows = packing.of(made(WIDTH, WIDTH, seed=7)), x + 0
    mx.eval(x, residual, weights, shared, rows)
    forms: list[tuple[int, Form]] = [
        (2, lambda y: y),
        (2, lambda y: residual + y),
        (2, lambda y: y + residual),
        (3, lambda y: y + packing.times(rows, shared)),
        (3, lambda y: (packing.times(rows, shared) + y) + residual),
        (3, lambda y: residual + (y + mx.sigmoid(residual[..., :1]) * rows)),
    ]
    for operations, after in forms:
        whole = partial(layers, after=after)
        before = calls()
        found = by_kernels(lambda whole=whole: whole(x, experts, weights))  # type: ignore[misc]
        assert calls() == before + operations
        assert_close(found, wide(whole(x, experts, weights, settle=mx.eval)), 1e-6)
    for threads in (1, 3):  # the last tokens of the last text, alone and beside others
        use(16, threads, threads)
        part = slice(-1, None), slice(-5, None)
        assert mx.array_equal(layers(x, experts, weights)[part], layers(x[part], experts[part], weights[part]))
    if shape == (2, 7):
        x[0, 3], weights[1, 2, 0] = mx.nan, mx.inf
        odd = ~mx.isfinite(layers(x, experts, weights)).all(axis=-1)
        assert odd.tolist() == [[(row, at) in ((0, 3), (1, 2)) for at in range(7)] for row in range(2)]


def test_what_only_looks_like_experts_is_left_alone() -> None:
    layers = Experts(PACKINGS[7], "of GPT-OSS, with biases")
    first, second = (
        mx.array(np.random.default_rng(i).integers(0, EXPERTS, (1, 4, 3)).astype(np.uint32)) for i in (1, 2)
    )
    x, weights = made(1, 4, WIDTH), made(1, 4, CHOSEN, seed=1)
    rows = mx.expand_dims(x, (-2, -3))
    bias = layers.biases[0]

    def times(experts: mx.array) -> mx.array:
        return layers.packing.gathered(rows[:, : experts.shape[1]], layers.layers[0], experts)

    cases: list[Callable[[], mx.array]] = [
        lambda: times(first) + mx.expand_dims(bias[second], -2),
        lambda: mx.sigmoid(times(first)) * times(second),
        lambda: mx.sigmoid(times(first)) * layers.packing.gathered(rows + 1, layers.layers[0], first),
        lambda: mx.sigmoid(times(first)) * (times(first) + mx.expand_dims(bias[first], -2)),
        lambda: times(first) + mx.expand_dims(bias[first], -2) + mx.expand_dims(bias[first], -2),
        lambda: (times(first).squeeze(-2) * weights[..., None]).sum(axis=-2) + x[:, :1],
        lambda: (times(first).squeeze(-2) * weights[..., None] * weights[..., None]).sum(axis=-2),
        lambda: (times(first).squeeze(-2) * weights[..., None]).sum(axis=-1),
        lambda: (times(first).squeeze(-2) * weights[..., None]).sum(axis=-2, keepdims=True),
        lambda: times(first).squeeze(-2) * weights[..., None],
        lambda: times(first).squeeze(-2) * weights[..., :1, None],
        lambda: mx.array(2.0, mx.float16) * times(first).squeeze(-2),
        lambda: (times(first).squeeze(-2) * (weights[..., None] + 1)).sum(axis=-2),
        lambda: (times(first) * weights[..., None, None]).sum(axis=-3),
        lambda: times(first) + mx.expand_dims(bias.astype(mx.float16)[first], -2),
        lambda: times(first).squeeze(-2) * weights.astype(mx.float16)[..., None],
        lambda: times(first[:, :3]).squeeze(0) * weights[:, :3, :, None],
    ]
    for case in cases:
        assert_close(by_kernels(case), wide(by_mlx(case)), 1e-3)  # rows are rounded to 16 bits by the kernels
    alone = layers.packing.gathered(x[0, :1], layers.layers[0], first[0, 0, 0]).squeeze(-2) * weights[0, 0, 0, None]
    with pytest.raises(IndexError, match="axis"):
        alone.sum(axis=-2)


@pytest.mark.parametrize("added", [False, True], ids=["alone", "and a residual"])
def test_rows_are_scaled_and_added_in_one_operation(added: bool) -> None:
    x, y = made(40, 2, 70).swapaxes(0, 1), made(2, 40, 70, seed=1)
    numbers = made(2, 40, 1, seed=2)
    mx.eval(x, y, numbers)

    def compute(part: slice = slice(None)) -> mx.array:
        scaled = x[:, part] * mx.sigmoid(numbers[:, part] - 1)
        return y[:, part] + scaled if added else scaled

    before = calls()
    found = by_kernels(compute)
    assert calls() == before + 1
    assert_close(found, wide(by_mlx(compute)), 1e-6)
    for threads in (1, 3):
        use(16, threads, threads)
        assert mx.array_equal(compute(slice(-1, None)), found[:, -1:])
    numbers[1, 2] = mx.nan
    assert mx.isnan(compute()).any(axis=-1).sum() == 1
    odd: list[Callable[[], mx.array]] = [
        lambda: mx.sigmoid(numbers[0]) * x,
        lambda: mx.sigmoid(numbers) * numbers,
        lambda: mx.sigmoid(x[..., :1]) * x[:1],
        lambda: mx.sigmoid(numbers) * x + y[:1],
        lambda: mx.sigmoid(numbers) * x + y + x,
    ]
    for case in odd:
        assert np.allclose(by_kernels(case), by_mlx(case), atol=1e-6, equal_nan=True)


def test_gradients_of_experts_are_those_of_mlx() -> None:
    layers, x = Experts(Packing("affine", 6, 64), "swiglu"), made(2, 3, WIDTH)  # not rounded
    router = made(EXPERTS, WIDTH, seed=3)
    mx.eval(router)

    def loss(x: mx.array) -> mx.array:
        scores = mx.softmax(x @ router.T, axis=-1)
        experts = first(-scores)
        weights = mx.take_along_axis(scores, experts, axis=-1)
        return layers(x, experts, weights / weights.sum(axis=-1, keepdims=True)).square().mean()

    assert_close(mx.grad(loss)(x), wide(by_mlx(lambda: mx.grad(loss)(x))), 1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (8,), (2, 70), (1, 3, 20)], ids=str)
def test_products_with_plain_weights_are_those_of_mlx_in_one_operation(shape: tuple[int, ...]) -> None:
    weights, bias, square = made(40, 96), made(40, seed=1), made(96, 96)
    x = made(*shape, 96, seed=2)
    turned = mx.contiguous(x.T).T
    mx.eval(weights, bias, square, x, turned)
    forms: tuple[Form, ...] = (lambda x: x @ weights.T, lambda x: mx.addmm(bias, x, weights.T))
    for form in forms:
        before = calls()
        found = by_kernels(lambda form=form: form(x))  # type: ignore[misc]
        assert calls() == before + 1
        assert mx.array_equal(found, by_mlx(lambda form=form: form(x)))  # type: ignore[misc]
        assert mx.array_equal(found, form(turned))
    before = calls()
    mx.eval(
        x @ mx.abs(weights).T,
        mx.addmm(bias, x, weights.T, 2.0, 1.0),
        x[..., :40] @ weights,
        x.astype(mx.float16) @ weights.T,
    )
    mx.eval(
        mx.addmm(bias[:1], x, weights.T),
        mx.addmm(mx.zeros((*shape, 40)), x, weights.T),
        x @ weights.reshape(2, 20, 96)[:1].swapaxes(1, 2),
    )
    stay = x @ mx.transpose(square, (0, 1))  # which turns nothing
    mx.eval(stay)
    assert calls() == before
    assert mx.array_equal(stay, x @ square)
