"""The kernels compute what MLX does, each row by itself, and read nothing beside their arrays."""

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runner.process.lean_mlx_lm  # noqa: F401
from runner import cpu
from runner.versions import install_command
from tests.lib.kernels import calls, library, mlx_own, use

from mlx_lm.models.cache import RotatingKVCache  # isort: skip

FLOATS = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 2e-3}
"""Types of rows -> the largest error of a product relative to its largest number."""
SPECIAL = [float("inf"), -float("inf"), float("nan"), 0.0, 88.8, 200.0, -200.0, 1e-30]


class Packing(NamedTuple):
    mode: str
    bits: int
    group: int

    @property
    def words(self) -> dict[str, Any]:
        return {"group_size": self.group, "bits": self.bits, "mode": self.mode}

    def of(self, weights: mx.array) -> list[mx.array]:
        return list(mx.quantize(weights, **self.words))

    def times(self, x: mx.array, parts: list[mx.array], *, transpose: bool = True) -> mx.array:
        """Returns the product of `x` with the weights in these parts."""
        multiply = cast("Callable[..., mx.array]", mx.quantized_matmul)
        return multiply(x, *parts, transpose=transpose, **self.words)

    def gathered(self, x: mx.array, parts: list[mx.array], experts: mx.array) -> mx.array:
        """Returns the products of rows of `x` with those of their experts."""
        multiply = cast("Callable[..., mx.array]", mx.gather_qmm)
        return multiply(x, *parts, rhs_indices=experts, transpose=True, **self.words)

    def unpacked(self, parts: list[mx.array], dtype: mx.Dtype | None) -> mx.array:
        return cast("Callable[..., mx.array]", mx.dequantize)(*parts, dtype=dtype, **self.words)

    def weights(self, parts: list[mx.array]) -> mx.array:
        """Returns the weights as the kernels take them: scales are not rounded to the type of `x`."""
        floats = [part.astype(mx.float32) if mx.issubdtype(part.dtype, mx.floating) else part for part in parts]
        return self.unpacked(floats, mx.float32)

    def taken(self, x: mx.array) -> mx.array:
        """Returns the rows as products take them: rounded to integers of 16 bits, with a scale for each group."""
        if platform.machine() != "x86_64" or self.bits not in (4, 8) or self.mode == "mxfp8":
            return x
        groups = np.array(x.astype(mx.float32)).reshape(*x.shape[:-1], -1, self.group)
        largest = np.abs(groups).max(-1, keepdims=True)
        factors = np.float32(32767) / largest
        return mx.array((np.rint(groups * factors).astype(np.float64) * (largest / np.float32(32767))).reshape(x.shape))


AFFINE = [Packing("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
PACKINGS = [*AFFINE, Packing("mxfp4", 4, 32), Packing("mxfp8", 8, 32), Packing("nvfp4", 4, 16)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    use(16, 1, 1)
    yield
    use(16)


def made(*shape: int, seed: int = 0, dtype: str = "float32") -> mx.array:
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return mx.array(numbers).astype(getattr(mx, dtype))


def wide(array: mx.array) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.array(array.astype(mx.float32)).astype(np.float64)


def by_kernels(compute: Callable[[], mx.array]) -> mx.array:
    """Returns the result, which kernels took part in."""
    before = calls()
    result = compute()
    mx.eval(result)
    assert calls() > before
    return result


def by_mlx(compute: Callable[[], mx.array]) -> mx.array:
    with mlx_own():
        result = compute()
        mx.eval(result)
    use(16, 1, 1)
    return result


def assert_close(found: mx.array, wanted: "np.ndarray[Any, Any]", most: float) -> None:
    assert found.shape == wanted.shape
    error = np.abs(wide(found) - wanted).max() / max(1e-6, np.abs(wanted).max())
    assert error <= most


LAYOUTS: dict[str, Callable[[mx.array], mx.array]] = {
    "rows": lambda x: x,
    "every other row": lambda x: mx.repeat(x, 2, axis=0)[::2],
    "columns": lambda x: mx.contiguous(x.T).T,
    "within wider rows": lambda x: mx.concatenate([x, x + 1], axis=-1)[..., : x.shape[-1]],
    "one row for all": lambda x: mx.broadcast_to(x[:1], x.shape),
    "four axes": lambda x: x.reshape(1, x.shape[0], 1, -1).transpose(2, 1, 0, 3),
}


@given(
    st.sampled_from(PACKINGS),
    st.sampled_from(sorted(FLOATS)),
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from((1, 2, 3, 4, 5, 8, 9, 40)),
    st.integers(1, 70),
    st.integers(1, 12),
)
def test_a_product_with_packed_weights_is_that_with_the_weights(
    packing: Packing, dtype: str, layout: str, rows: int, outputs: int, hundreds: int
) -> None:
    k = 128 * hundreds
    parts = packing.of(made(outputs, k, dtype=dtype if packing.mode == "affine" else "float32"))
    x = LAYOUTS[layout](made(rows, k, seed=1, dtype=dtype))
    found = by_kernels(lambda: packing.times(x, parts))
    assert found.dtype == by_mlx(lambda: packing.times(x, parts)).dtype
    assert_close(found, wide(packing.taken(x)) @ wide(packing.weights(parts)).T, FLOATS[dtype])


def test_rows_may_be_longer_than_what_is_unpacked_at_a_time() -> None:
    parts, x = PACKINGS[7].of(made(9, 1 << 15)), made(20, 1 << 15, seed=1)
    found = by_kernels(lambda: PACKINGS[7].times(x, parts))
    assert_close(found, wide(PACKINGS[7].taken(x)) @ wide(PACKINGS[7].weights(parts)).T, 2e-6)
    assert mx.array_equal(PACKINGS[7].times(x[:1], parts), found[:1])


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_a_row_is_the_same_in_any_company_and_on_any_number_of_threads(packing: Packing) -> None:
    parts, x = packing.of(made(193, 384)), made(70, 384, seed=1)
    alone = mx.concatenate([packing.times(x[i : i + 1], parts) for i in range(70)])
    for threads, rows in product((1, 3), (2, 3, 4, 5, 7, 8, 9, 13, 17, 70)):
        use(16, threads, threads)
        together = [packing.times(x[i : i + rows], parts) for i in range(0, 70, rows)]
        assert mx.array_equal(mx.concatenate(together), alone)


IN_INTEGERS = [packing for packing in PACKINGS if packing.bits in (4, 8) and packing.mode != "mxfp8"]


@pytest.mark.parametrize("packing", IN_INTEGERS, ids=str)
def test_rounding_rows_costs_an_eighth_of_what_bfloat16_does_at_most(packing: Packing) -> None:
    """A number of each group is a hundred times as large as the others, as in hidden states of large models."""
    parts = packing.of(made(64, 512))
    x = made(32, 512, seed=1) * mx.where(mx.arange(512) % packing.group == 3, 100, 1)
    wanted = wide(x) @ wide(packing.weights(parts)).T
    halved = wide(x.astype(mx.bfloat16)) @ wide(packing.weights(parts)).T
    found = wide(by_kernels(lambda: packing.times(x, parts)))
    assert 8 * np.abs(found - wanted).max() <= np.abs(halved - wanted).max()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="two widths of one processor")
@pytest.mark.parametrize("packing", IN_INTEGERS, ids=str)
def test_a_product_in_integers_is_the_same_for_vectors_of_any_width(packing: Packing) -> None:
    parts, x = packing.of(made(70, 384)), made(20, 384, seed=1)
    products = []
    for width in (8, 16):
        use(width, 1, 1)
        products.append([packing.times(x[:rows], parts) for rows in (1, 3, 20)])
    for narrow, wider in zip(*products, strict=True):
        assert mx.array_equal(narrow, wider)


@pytest.mark.parametrize("packing", IN_INTEGERS, ids=str)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e35, 1e-38, 0.0])
def test_a_number_beyond_all_others_changes_its_row_alone(packing: Packing, number: float) -> None:
    parts, x = packing.of(made(40, 256)), made(3, 256, seed=1)
    x[1] = mx.where(mx.arange(256) < 128, number, 0)
    found = packing.times(x, parts)
    assert mx.array_equal(found[::2], packing.times(made(3, 256, seed=1)[::2], parts))
    if np.isfinite(number):
        wanted = wide(x[1]) @ wide(packing.weights(parts)).T
        assert np.allclose(wide(found[1]), wanted, rtol=0, atol=max(1e-30, 1e-4 * number))
    else:
        assert not np.isfinite(wide(found[1])).any()


@pytest.mark.parametrize("packing", [PACKINGS[0], PACKINGS[7], PACKINGS[16], *PACKINGS[18:]], ids=str)
def test_rows_of_an_embedding_are_its_weights(packing: Packing) -> None:
    parts, rows = packing.of(made(50, 256)), mx.array([[3, 49], [0, 3]])
    taken = [part[rows] for part in parts]
    for dtype in (None, mx.float32, mx.bfloat16, mx.float16):

        def compute(dtype: mx.Dtype | None = dtype) -> mx.array:
            return packing.unpacked(taken, dtype)

        found, wanted = by_kernels(compute), by_mlx(compute)
        assert found.dtype == wanted.dtype
        assert_close(found, wide(wanted), 8e-3 if found.dtype == mx.bfloat16 else 2e-3)


@pytest.mark.parametrize("packing", [PACKINGS[7], PACKINGS[17], *PACKINGS[18:]], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (1, 60)])
@pytest.mark.parametrize("own_rows", [False, True], ids=["one row for all experts", "a row for each expert"])
def test_experts_compute_the_rows_that_their_weights_would(
    packing: Packing, shape: tuple[int, int], own_rows: bool
) -> None:
    parts = packing.of(made(6, 40, 256))
    experts = np.random.default_rng(2).integers(0, 6, (*shape, 3)).astype(np.uint32)
    x = made(*shape, 3 if own_rows else 1, 1, 256, seed=1)
    found = by_kernels(lambda: packing.gathered(x, parts, mx.array(experts)))
    assert found.shape == (*shape, 3, 1, 40)
    for place in np.ndindex(*experts.shape):
        row = x[(*place[:2], place[2] if own_rows else 0)]
        assert mx.array_equal(found[place], packing.times(row, [part[experts[place]] for part in parts]))


PACKED_HEADS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "a head for each": ((2, 3, 5), (2, 3)),
    "heads that share": ((2, 3, 4, 5), (2, 3, 1)),
    "one sequence": ((1, 1, 1), (1, 1)),
}
"""The leading axes of rows, their number last; those of packed keys and values."""


@pytest.mark.parametrize("packing", [PACKINGS[6], PACKINGS[7], PACKINGS[12], PACKINGS[16], PACKINGS[18]], ids=str)
@pytest.mark.parametrize("form", PACKED_HEADS)
@pytest.mark.parametrize("keys", [1, 64, 200])
def test_packed_keys_and_values_are_those_that_they_stand_for(packing: Packing, form: str, keys: int) -> None:
    """Within larger buffers, as caches have them."""
    leading, heads = PACKED_HEADS[form]
    room = [part[..., :keys, :] for part in packing.of(made(*heads, keys + 30, 128))]
    rows = made(*leading, 128, seed=1)
    scores = by_kernels(lambda: packing.times(rows, room))
    assert_close(scores, wide(packing.taken(rows)) @ wide(packing.weights(room)).swapaxes(-1, -2), 2e-6)
    weights = mx.softmax(scores, axis=-1)
    sums = by_kernels(lambda: packing.times(weights, room, transpose=False))
    assert_close(sums, wide(weights) @ wide(packing.weights(room)), 2e-6)
    first = (*[slice(None)] * (len(leading) - 1), slice(1))
    assert mx.array_equal(packing.times(rows[first], room), scores[first])
    assert mx.array_equal(packing.times(weights[first], room, transpose=False), sums[first])


# --- Attention


class Heads(NamedTuple):
    queries: int
    keys: int
    d: int
    dv: int


HEADS = [Heads(9, 3, 64, 64), Heads(8, 8, 128, 128), Heads(4, 1, 80, 80), Heads(4, 4, 192, 128), Heads(2, 2, 20, 12)]


def attention(
    heads: Heads, length: int, keys: int, dtype: str, mask: str, sinks: bool
) -> tuple[Callable[[], mx.array], "np.ndarray[Any, Any]"]:
    """Returns the computation, over parts of larger arrays as caches have them, and its result in float64."""
    q = made(2, length, heads.queries, heads.d, seed=1, dtype=dtype).transpose(0, 2, 1, 3)
    k = made(2, heads.keys, keys + 30, heads.d, seed=2, dtype=dtype)[:, :, :keys]
    v = made(2, heads.keys, keys + 30, heads.dv, seed=3, dtype=dtype)[:, :, :keys]
    visible = np.random.default_rng(4).random((2, 1, length, keys)) < 0.7
    added = made(length, keys, seed=5, dtype=dtype)
    sink = made(heads.queries, seed=6, dtype=dtype) if sinks else None
    chosen = {"none": None, "causal": "causal", "bool": mx.array(visible), "additive": added}[mask]

    def compute() -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=chosen, sinks=sink)

    shared = heads.queries // heads.keys
    scores = 0.2 * wide(q) @ np.repeat(wide(k), shared, 1).swapaxes(-1, -2)
    if mask == "causal":
        scores = np.where(np.tri(length, keys, keys - length, dtype=bool), scores, -np.inf)
    elif mask == "bool":
        scores = np.where(visible, scores, -1e30)
    elif mask == "additive":
        scores = scores + wide(added)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(np.minimum(700, wide(sink)[:, None, None] - scores.max(-1, keepdims=True)))
    return compute, weights / total @ np.repeat(wide(v), shared, 1)


@given(
    st.sampled_from(HEADS),
    st.sampled_from([(1, 1), (1, 333), (3, 200), (8, 65), (40, 40), (130, 130), (100, 400)]),
    st.sampled_from(sorted(FLOATS)),
    st.sampled_from(("none", "causal", "bool", "additive")),
    st.booleans(),
)
def test_attention_is_the_softmax_of_scores_over_values(
    heads: Heads, lengths: tuple[int, int], dtype: str, mask: str, sinks: bool
) -> None:
    compute, wanted = attention(heads, *lengths, dtype, mask, sinks)
    assert_close(by_kernels(compute), wanted, 2 * FLOATS[dtype])


def test_a_query_that_sees_no_key_weighs_all_alike_as_in_mlx() -> None:
    q, k, v = made(1, 2, 3, 32), made(1, 2, 90, 32, seed=1), made(1, 2, 90, 32, seed=2)
    nothing = mx.zeros((3, 90), mx.bool_)
    found = by_kernels(lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=nothing))
    assert_close(found, np.broadcast_to(wide(v).mean(2, keepdims=True), found.shape), 1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_the_same_wherever_a_prompt_is_cut(heads: Heads) -> None:
    q, k, v = (
        made(1, heads.queries, 150, heads.d),
        made(1, heads.keys, 150, heads.d),
        made(1, heads.keys, 150, heads.dv),
    )

    def attend(begin: int, end: int) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            q[:, :, begin:end], k[:, :, :end], v[:, :, :end], scale=0.2, mask="causal"
        )

    whole = attend(0, 150)
    for threads, step in product((1, 3), (1, 7, 64, 100)):
        use(16, threads, threads)
        parts = [attend(begin, min(150, begin + step)) for begin in range(0, 150, step)]
        assert mx.array_equal(mx.concatenate(parts, axis=2), whole)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden", ["false", "lowest", "infinite"])
def test_attention_of_a_row_is_the_same_wherever_its_keys_lie(heads: Heads, dtype: str, hidden: str) -> None:
    """In a batch: behind padding, before it, and around the end of a ring. One query, and the last three."""
    columns, places = 150, [(20, 130), (149, 1), (149, 60), (3, 7), (64, 43), (100, 120), (140, 60)]
    k = made(len(places), heads.keys, columns, heads.d, seed=2, dtype=dtype)
    v = made(len(places), heads.keys, columns, heads.dv, seed=3, dtype=dtype)
    for queries in (1, 3):
        q = made(len(places), heads.queries, queries, heads.d, seed=1, dtype=dtype)
        tokens = np.array([[(column - first) % columns for column in range(columns)] for _, first in places])
        last = np.array([[count - queries + query for query in range(queries)] for count, _ in places])
        mask = mx.array(tokens[:, None] <= last[:, :, None])[:, None]
        if hidden != "false":
            mask = mx.where(mask, 0, mx.finfo(q.dtype).min if hidden == "lowest" else -mx.inf).astype(q.dtype)
        together = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=mask)
        for row, (count, first) in enumerate(places):
            at = (first + mx.arange(count)) % columns
            own = [x[row : row + 1, :, at] for x in (k, v)]
            alone = mx.fast.scaled_dot_product_attention(q[row : row + 1], *own, scale=0.2, mask="causal")
            assert mx.array_equal(together[row], alone[0]), (queries, count, first)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window", [5, 70])
def test_attention_in_a_window_is_that_over_its_keys_alone(heads: Heads, dtype: str, window: int) -> None:
    q, k = made(1, heads.queries, 40, heads.d, dtype=dtype), made(1, heads.keys, 100, heads.d, seed=1, dtype=dtype)
    v = made(1, heads.keys, 100, heads.dv, seed=2, dtype=dtype)
    mask = mx.array(np.tri(40, 100, 60, dtype=bool) & ~np.tri(40, 100, 60 - window, dtype=bool))
    together = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=mask)
    for query in range(40):
        seen = slice(max(0, 61 + query - window), 61 + query)
        own = q[:, :, query : query + 1], k[:, :, seen], v[:, :, seen]
        assert mx.array_equal(together[:, :, query : query + 1], mx.fast.scaled_dot_product_attention(*own, scale=0.2))


def test_attention_over_a_window_that_has_wrapped_begins_with_its_oldest_keys() -> None:
    layer, q = RotatingKVCache(130), made(1, 4, 1, 64)
    k, v = made(1, 2, 300, 64, seed=1), made(1, 2, 300, 64, seed=2)
    layer.update_and_fetch(k[:, :, :100], v[:, :, :100])
    for token in range(100, 300):
        new, seen = slice(token, token + 1), slice(max(0, token - 129), token + 1)
        kept = layer.update_and_fetch(k[:, :, new], v[:, :, new])
        found = mx.fast.scaled_dot_product_attention(q, *kept, scale=0.2)
        assert mx.array_equal(found, mx.fast.scaled_dot_product_attention(q, k[:, :, seen], v[:, :, seen], scale=0.2))
        again = mx.fast.scaled_dot_product_attention(q, *kept, scale=0.2)  # by another layer: they are evaluated now
        assert mx.array_equal(again, found)


# --- Rows


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 31, 577])
def test_norms_are_those_of_mlx(dtype: str, width: int) -> None:
    x = made(2, 3, width, dtype=dtype).transpose(1, 0, 2)
    for weight in (None, made(width, seed=1, dtype=dtype), made(width, seed=1)):

        def compute(weight: mx.array | None = weight) -> mx.array:
            return mx.fast.rms_norm(x, weight, 1e-5)

        found, wanted = by_kernels(compute), by_mlx(compute)
        assert found.dtype == wanted.dtype
        assert_close(found, wide(wanted), FLOATS[dtype])


PERIODS = mx.array(np.random.default_rng(0).uniform(1, 1e4, 32).astype(np.float32))
TURNS: dict[str, dict[str, Any]] = {
    "halves": {"dims": 64, "traditional": False, "base": 1e4, "scale": 1.0, "offset": 5},
    "neighbours": {"dims": 64, "traditional": True, "base": 1e4, "scale": 0.5, "offset": 3},
    "some dimensions": {"dims": 32, "traditional": False, "base": 1e6, "scale": 1.0, "offset": 90},
    "an offset for each sequence": {
        "dims": 64,
        "traditional": False,
        "base": 1e4,
        "scale": 1.0,
        "offset": mx.array([5, 99]),
    },
    "periods": {"dims": 64, "traditional": False, "base": None, "scale": 1.0, "offset": 7, "freqs": PERIODS},
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("turn", TURNS)
def test_rotary_positions_are_those_of_mlx(dtype: str, turn: str) -> None:
    x = made(2, 7, 3, 64, dtype=dtype).transpose(0, 2, 1, 3)

    def compute() -> mx.array:
        return mx.fast.rope(x, **TURNS[turn])

    found, wanted = by_kernels(compute), by_mlx(compute)
    assert found.dtype == wanted.dtype
    assert_close(found, wide(wanted), max(1e-5, FLOATS[dtype]))


FUNCTIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "sigmoid": mx.sigmoid,
    "tanh": mx.tanh,
    "exp": mx.exp,
    "silu": lambda x: x * mx.sigmoid(x),
    "silu, the other way round": lambda x: mx.sigmoid(x) * x,
    "gated": lambda x: (x * mx.sigmoid(x)) * (x + 1),
    "gated in columns": lambda x: (x * mx.sigmoid(x)) * mx.contiguous((x + 1).T).T,
    "softmax": lambda x: mx.softmax(x, axis=-1),
    "softmax of parts of rows": lambda x: mx.softmax(x[:, 1:], axis=-1, precise=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 7, 1003])
def test_functions_are_those_of_mlx(name: str, width: int) -> None:
    x = 4 * made(3, width + 1)
    found, wanted = by_kernels(lambda: FUNCTIONS[name](x)), by_mlx(lambda: FUNCTIONS[name](x))
    assert np.allclose(wide(found), wide(wanted), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "exp"])
def test_functions_of_numbers_beyond_all_others_are_those_of_mlx(name: str) -> None:
    x = mx.array(SPECIAL)
    found, wanted = by_kernels(lambda: FUNCTIONS[name](x)), by_mlx(lambda: FUNCTIONS[name](x))
    assert np.allclose(wide(found), wide(wanted), equal_nan=True)


def test_the_factors_of_a_product_may_be_used_again() -> None:
    x = made(5, 40)
    sigmoid = mx.sigmoid(x)
    silu = x * sigmoid
    gated = silu * (x + 1)
    wanted = 1 / (1 + np.exp(-wide(x)))
    for found, number in ((gated, wide(x) * wanted * (wide(x) + 1)), (silu, wide(x) * wanted), (sigmoid, wanted)):
        assert np.allclose(wide(found), number, atol=1e-6)


FUSED: dict[str, Callable[[mx.array, mx.array, mx.array], mx.array]] = {
    "a residual": lambda x, y, _: x + y,
    "a residual before it": lambda x, y, _: y + x,
    "a gate": lambda _, y, z: (y * mx.sigmoid(y)) * z,
    "a gate of itself": lambda _, y, __: (y * mx.sigmoid(y)) * y,
}


@pytest.mark.parametrize("form", FUSED)
@pytest.mark.parametrize("packing", [PACKINGS[7], PACKINGS[18]], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_what_follows_a_product_is_computed_with_it_to_the_same_bits(form: str, packing: Packing, rows: int) -> None:
    first, second = (packing.of(made(256, 256, seed=seed)) for seed in (1, 2))
    x = made(rows, 256, seed=3)
    before = calls()
    fused = FUSED[form](x, packing.times(x, first), packing.times(x, second))
    mx.eval(fused)
    assert calls() == before + 1
    y, z = packing.times(x, first), packing.times(x, second)
    mx.eval(y, z)  # as numbers, they have no operation that could be looked at
    assert mx.array_equal(fused, FUSED[form](x, y, z))


# --- Copies

PARTS_OF: dict[str, Callable[[mx.array], mx.array]] = {
    "whole": lambda x: x,
    "columns of longer ones": lambda x: mx.concatenate([x, x], axis=2)[:, :, 2 : 2 + x.shape[2]],
    "rows turned": lambda x: mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2),
    "one for all rows": lambda x: mx.broadcast_to(x[:1, :1, :1], x.shape),
    "every other number": lambda x: mx.repeat(x, 2, axis=-1)[..., ::2],
}


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("second", PARTS_OF)
def test_arrays_are_joined_as_by_mlx(second: str, dtype: str, axis: int) -> None:
    first, x = ((10 * made(6, 5, 40, 32, seed=seed)).astype(getattr(mx, dtype)) for seed in (1, 2))
    x = x[tuple(slice(3) if at == axis % 4 else slice(None) for at in range(4))]
    parts = [first, PARTS_OF[second](x), first]
    for threads in (1, 2):
        use(16, threads, threads)
        joined = by_kernels(lambda: mx.concatenate(parts, axis=axis))
        assert joined.dtype == first.dtype
        assert mx.array_equal(joined, by_mlx(lambda: mx.concatenate(parts, axis=axis)))


def test_a_join_of_unlike_arrays_is_refused_as_by_mlx() -> None:
    long = mx.zeros((40, 300))
    for parts, axis in (([long, long[:, :200]], 0), ([long, long[0]], 0), ([long, long], 2), ([], 0)):
        with pytest.raises((ValueError, IndexError), match=r"\[concatenate\]|dimensions"):
            mx.concatenate(parts, axis=axis)


def test_gradients_are_those_of_mlx() -> None:
    packing, x, weight = Packing("affine", 6, 64), made(5, 128), made(128, seed=1)  # not rounded
    parts = packing.of(made(30, 128, seed=2))

    def loss(x: mx.array, weight: mx.array) -> mx.array:
        y = packing.times(mx.fast.rms_norm(x, weight, 1e-5), parts)
        gated = (y * mx.sigmoid(y)) * packing.times(x, parts)
        joined = mx.concatenate([gated + packing.times(x, parts)] * 40, axis=1)
        return joined.square().mean()

    gradient = mx.grad(loss, argnums=(0, 1))
    for found, wanted in zip(gradient(x, weight), by_mlx(lambda: gradient(x, weight)), strict=True):
        assert_close(found, wide(wanted), 1e-5)


X, PARTS = made(4, 128), PACKINGS[7].of(made(128, 128))
OTHERS: dict[str, Callable[[], mx.array]] = {
    "the weights are not transposed": lambda: PACKINGS[7].times(X, PARTS, transpose=False),
    "sigmoid of halves": lambda: mx.sigmoid(X.astype(mx.float16)),
    "softmax of columns": lambda: mx.softmax(X, axis=0),
    "nothing": lambda: mx.fast.rms_norm(X[:0], None, 1e-5),
    "a short join": lambda: mx.concatenate([X, X]),
    "a join with nothing": lambda: mx.concatenate([mx.zeros((64, 128)), X[:0]]),
    "a join of two types": lambda: mx.concatenate([mx.zeros((64, 128)), mx.zeros((64, 128), mx.float16)]),
    "a join of one": lambda: mx.concatenate([mx.zeros((64, 128))]),
    "complex numbers": lambda: mx.exp(X.astype(mx.complex64)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_the_kernels_do_not_know_is_left_to_mlx(case: str) -> None:
    before = calls()
    mx.eval(OTHERS[case]())
    assert calls() == before


# --- Memory: every array ends where nothing may be read.


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p if name == "x" else ctypes.c_size_t) for name in ("x", "ldx", "m", "n", "k")),
        *((name, ctypes.c_int) for name in ("bits", "group", "mode")),
        *((name, ctypes.c_void_p) for name in ("w", "scales", "biases")),
        ("scale_type", ctypes.c_int),
        ("out", ctypes.c_void_p),
        ("out_type", ctypes.c_int),
        ("order", ctypes.c_void_p),
        ("added", ctypes.c_void_p),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "mask", "sinks", "out")),
        *(
            (name, ctypes.c_int)
            for name in ("heads", "kv_heads", "queries", "keys", "d", "dv", "type", "mask_type", "causal", "oldest")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int64 * count) for name, count in (("qs", 3), ("ks", 3), ("vs", 3), ("ms", 4))),
    )


_FUNCTIONS = (
    "take",
    "product",
    "unpack",
    "weigh",
    "attend",
    "rms_norm",
    "rope",
    "unary",
    "softmax",
    "to_float",
    "from_float",
)


class _Kernels(ctypes.Structure):
    _fields_ = (("width", ctypes.c_int), *((name, ctypes.c_void_p) for name in _FUNCTIONS))


class Guarded:
    """Arrays of numbers, each at the end of pages that are followed by one that nobody may read or write."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._kept: list[mmap.mmap] = []

    def __call__(self, data: "np.ndarray[Any, Any]") -> int:
        page = mmap.PAGESIZE
        size = -(-data.nbytes // page) * page
        memory = mmap.mmap(-1, size + page)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert self._libc.mprotect(ctypes.c_void_p(begin + size), ctypes.c_size_t(page), mmap.PROT_READ * 0) == 0
        place = begin + size - data.nbytes
        ctypes.memmove(place, data.tobytes(), data.nbytes)
        self._kept.append(memory)
        return place


def check_bounds(table: _Kernels) -> None:
    """Calls every kernel over arrays that end at a page that nobody may touch: a step beyond ends the process."""
    at, numbers = Guarded(), np.random.default_rng(0)

    def floats(*shape: int) -> int:
        return at(numbers.standard_normal(shape).astype(np.float32))

    def call(name: str, *words: Any) -> None:
        ctypes.CFUNCTYPE(None)(getattr(table, name))(*words)

    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
    codes = {"affine": 0, "mxfp4": 1, "mxfp8": 2, "nvfp4": 3}
    for packing, rows, outputs, more in product(PACKINGS, (1, 2, 3, 4, 5, 9), (1, 5, 8), (0, 1)):
        k, affine = 128 + more * packing.group, packing.mode == "affine"
        groups = k // packing.group
        words = at(numbers.integers(0, 256, (outputs, k * packing.bits // 8)).astype(np.uint8))
        scales = floats(outputs, groups) if affine else at(np.full((outputs, groups), 60, np.uint8))
        packed = (packing.bits, packing.group, codes[packing.mode], words, scales)
        results = floats(outputs, groups) if affine else None, 0, floats(rows, outputs), 0, None, floats(rows, outputs)
        whole = ctypes.byref(_Product(floats(rows, k), k, rows, outputs, k, *packed, *results))
        call("product", whole, size(0), size(outputs), pointer(floats(-(-outputs // table.width) * table.width, k)))
        call("unpack", whole, size(outputs - 1), pointer(floats(k)))
        turned = _Product(floats(rows, outputs), outputs, rows, outputs, k, *packed, *results[:2], floats(rows, k), 0)
        call("weigh", ctypes.byref(turned), pointer(floats(64 * (k + rows))))
        call("take", whole, pointer(floats(k)), 0, pointer(floats(k)))
    for kind, item in ((0, np.float32), (1, np.uint16), (2, np.uint16)):

        def row(*shape: int, item: type = item) -> ctypes.c_void_p:
            return pointer(at(np.ones(shape, item)))

        for n in (1, 7, 8, 9, 33, 70):
            call("to_float", row(n), kind, size(n), pointer(floats(n)))
            call("from_float", pointer(floats(n)), size(n), row(n), kind)
            call("rms_norm", row(n), kind, size(n), row(n), kind, number(1e-5), row(n), kind)
            for what, factor in product(range(4), (None, floats(n))):
                call("unary", what, pointer(floats(n)), pointer(factor), pointer(floats(n)), size(n))
            call("softmax", pointer(floats(n)), pointer(floats(n)), size(n))
        for dims, traditional in product((2, 20, 64), (0, 1)):
            angles = pointer(floats(dims // 2))
            call("rope", row(66), kind, 66, dims, traditional, angles, angles, row(66))
        widths = (64, 64), (20, 12), (80, 96)
        masked = product(widths[1:2], (1, 9), (9, 70), MASKS)
        for (d, dv), queries, keys, mask in (*product(widths, (1, 3, 9), (9, 64, 70), ("all",)), *masked):
            heads, kv = 3, 2
            shown = [pointer(at(each)) for each in MASKS[mask](queries, keys)] or [pointer()]
            inputs = row(kv * heads, queries, d), row(kv, keys, d), row(kv, keys, dv), *shown
            oldest = 0 if shown[0] else keys // 2
            sizes = heads, kv, queries, keys, d, dv, kind, 0 if mask == "added" else 3, 0, oldest
            scores = _Attention(*inputs, row(kv * heads), row(kv * heads, queries, dv), *sizes, 0.1)
            scores.qs[:], scores.ks[:], scores.vs[:] = (0, queries * d, d), (0, keys * d, d), (0, keys * dv, dv)
            scores.ms[:] = (0, 0, keys, 1)
            padded = sum(-(-each // table.width) * table.width for each in (d, dv))
            room = pointer(floats(heads * queries * (padded + 72 + 3) + 72 * padded))
            call("attend", ctypes.byref(scores), 0, kv - 1, 0, queries, room)


MASKS: dict[str, Callable[[int, int], list["np.ndarray[Any, Any]"]]] = {
    "none": lambda queries, keys: [],
    "all": lambda queries, keys: [np.ones((queries, keys), np.uint8)],
    "nothing": lambda queries, keys: [np.zeros((queries, keys), np.uint8)],
    "ring": lambda queries, keys: [(np.add.outer(-np.arange(queries), np.arange(keys)) % keys != 5).astype(np.uint8)],
    "window": lambda queries, keys: [(np.tri(queries, keys, 4) * (1 - np.tri(queries, keys, -2))).astype(np.uint8)],
    "added": lambda queries, keys: [np.where(np.tri(queries, keys), 0, -np.inf).astype(np.float32)],
}
"""Masks of queries over keys."""


def table_of(width: int) -> _Kernels:
    choose = library("_kernels").kernels_use
    choose.restype = ctypes.POINTER(_Kernels)
    return cast("_Kernels", choose(width, None, 1, 1)[0])


def test_no_kernel_touches_what_lies_behind_its_arrays() -> None:
    code = "from tests.unit.test_kernels import check_bounds, table_of; check_bounds(table_of(16))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


OTHER_WIDTHS = """
import ctypes, sys
import numpy as np
from tests.unit.test_kernels import PACKINGS, _Kernels, check_bounds, check_products
library = ctypes.CDLL(sys.argv[1])
for width in (4, 16):
    table = _Kernels.in_dll(library, f"kernels_{width}")
    assert table.width == width
    check_bounds(table)
    check_products(table)
"""


def check_products(table: _Kernels) -> None:
    """Compares products and unpacked rows with MLX's own weights."""
    kernel = ctypes.CFUNCTYPE(None)
    codes = {"affine": 0, "mxfp4": 1, "mxfp8": 2, "nvfp4": 3}
    for packing, rows in product(PACKINGS, (1, 4, 9)):
        parts, x = packing.of(made(9, 256)), np.array(made(rows, 256, seed=1))
        wanted = np.array(packing.weights(parts))
        words, scales, *biases = (np.array(part) for part in parts)
        taken, found, scratch = np.empty_like(x), np.empty((rows, 9), np.float32), np.empty((9, 256), np.float32)
        places = [each.ctypes.data for each in (words, scales, *biases, *[scales][len(biases) :])]
        packed = (256, rows, 9, 256, packing.bits, packing.group, codes[packing.mode], *places, 0)
        whole = ctypes.byref(_Product(taken.ctypes.data, *packed, found.ctypes.data, 0, None, None))
        for i in range(rows):
            line = ctypes.c_void_p(x[i].ctypes.data)
            kernel(table.take)(whole, line, 0, ctypes.c_void_p(taken[i].ctypes.data))
        kernel(table.product)(whole, ctypes.c_size_t(0), ctypes.c_size_t(9), ctypes.c_void_p(scratch.ctypes.data))
        assert np.allclose(found, x.astype(np.float64) @ wanted.T, rtol=0, atol=1e-4), (table.width, packing, rows)
        kernel(table.unpack)(whole, ctypes.c_size_t(8), ctypes.c_void_p(scratch.ctypes.data))
        assert np.allclose(scratch[0], wanted[8], rtol=1e-6), (table.width, packing)


@pytest.mark.timeout(300)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the vectors of AVX2 stand in for the others")
def test_kernels_of_other_widths_compute_the_same(tmp_path: Path) -> None:
    """Those for NEON and AVX-512, in the same source, from the instructions that this processor has."""
    folder, target = Path(cpu.__file__).parent, '#pragma GCC target("avx2,fma")\n'
    words = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{folder}", "-Wno-psabi"]
    for width in (4, 16):
        names = f"#define WIDTH {width}\n#define TABLE kernels_{width}\n"
        export = f'struct Kernels; extern "C" const Kernels kernels_{width};\n#include "simd.h"\n'
        (tmp_path / f"{width}.cpp").write_text(target + names + '#include "kernels.h"\n' + export)
    library = tmp_path / "widths.so"
    sources = [str(tmp_path / f"{width}.cpp") for width in (4, 16)]
    subprocess.run([*words, *sources, "-o", str(library)], check=True, timeout=250)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_WIDTHS, str(library)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


SANITIZED = """
import sys, pytest
from runner import cpu
cpu.__file__ = sys.argv[1]
words = ["-q", "-p", "no:xdist", f"--basetemp={sys.argv[3]}", "-k", "not other_widths and not sanitizer"]
status = pytest.main([*words, "tests/unit/test_kernels.py"])
assert sys.argv[2] in open("/proc/self/maps").read()
sys.exit(status)
"""


@pytest.mark.slow
def test_the_address_sanitizer_finds_nothing(tmp_path: Path) -> None:
    """All tests of this file, over kernels that check each of their reads and writes."""
    folder, mlx = Path(cpu.__file__).parent, Path(mx.__file__)
    words = ["-O1", "-g1", "-fPIC", "-fsanitize=address"]
    checked = {"mlx", {4: "neon", 8: "avx2", 16: "avx512"}[library("_kernels").kernels_width(16)]}
    compiler = ["g++", "-std=c++20", "-Wno-psabi", f"-I{mlx.parent}/include", "-c"]
    running = [
        subprocess.Popen([*compiler, *words[: 4 if name in checked else 3], str(folder / f"{name}.cpp")], cwd=tmp_path)
        for name in ("avx2", "avx512", "neon", "mlx")
    ]
    assert [each.wait(1000) for each in running] == [0] * len(running)
    kernels, shim = tmp_path / "_kernels.so", tmp_path / "_shim.so"
    links = ["-Wl,--unresolved-symbols=ignore-in-shared-libs", f"-Wl,--version-script={folder}/exports.map"]
    objects = [str(path) for path in tmp_path.glob("*.o")]
    linked = ["g++", *words, "-shared", *objects, f"-L{mlx.parent}/lib", "-l:libmlx.so", *links, "-o", str(kernels)]
    subprocess.run(linked, check=True)
    subprocess.run(["gcc", *words, "-shared", str(folder / "blas.c"), "-o", str(shim)], check=True)
    # libstdc++ for MLX's exceptions: the sanitizer looks for what throws them when it starts.
    names = ("libasan.so", "libstdc++.so")
    asks = [["gcc", f"-print-file-name={name}"] for name in names]
    found = [subprocess.run(each, capture_output=True, text=True, check=True).stdout.strip() for each in asks]
    around = {**os.environ, "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0"}
    test = [sys.executable, "-c", SANITIZED, str(tmp_path / "__init__.py"), str(kernels), str(tmp_path / "inner")]
    done = subprocess.run(test, env=around, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- What serves, and what does not

CHOICE = """
import sys
from runner import cpu
{before}
print(cpu.find_kernels())
print(cpu.preload("auto", 1, sys.argv[1]).kernels)
import mlx.core as mx
print(mx.fast.rms_norm(mx.array([3.0, 4.0]), None, 0.0).tolist())
"""
KEPT = """
import pathlib
cpu.__file__ = {place!r} + "/__init__.py"
pathlib.Path({place!r}, "_kernels.missing").write_text("no luck\\n")
"""
CHOICES = {
    "off": ("", "off", "(--kernels off)"),
    "never built": ("cpu._KERNELS = 'missing.so'", "auto", "(slow: never built; install again: `{again}`)"),
    "no compiler": (KEPT, "auto", "(slow: no luck; install again: `{again}`)"),
    "no wide vectors": ("cpu._WIDEST = 1", "auto", "(slow: this processor lacks AVX2)"),
    "an older build": (
        "cpu._KERNELS = '_shim.so'  # which lacks the functions of kernels",
        "auto",
        "(slow: built for another version of MLX; install again: `{again}`)",
    ),
    "another MLX": (
        "import ctypes; ctypes.CDLL({stub!r}, mode=ctypes.RTLD_GLOBAL)",
        "auto",
        "(slow: built for another version of MLX; install again: `{again}`)",
    ),
}


def chosen(before: str, choice: str = "auto") -> list[str]:
    """Returns what a look says, what serves, and numbers that MLX computes then."""
    words = [sys.executable, "-c", CHOICE.format(before=before), choice]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


@pytest.mark.parametrize("case", CHOICES)
def test_without_kernels_mlx_computes_and_the_log_says_why(case: str, tmp_path: Path) -> None:
    before, choice, why = CHOICES[case]
    source, stub = tmp_path / "stub.cpp", tmp_path / "stub.so"
    if "stub" in before:
        source.write_text('namespace mlx::core { extern const char *version() { return "0.99.0"; } }')
        subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(stub)], check=True, timeout=60)
    looked, used, numbers = chosen(before.format(stub=str(stub), place=str(tmp_path)), choice)
    assert used == f"MLX's own {why.format(again=install_command())}"
    assert case == "off" or looked == used
    assert numbers.startswith("[0.848528")


def test_what_check_says_is_what_serves() -> None:
    looked, used, _ = chosen("")
    assert looked == used
    assert used in ("for AVX2", "for AVX-512", "for NEON")


@pytest.mark.parametrize("counts", [(1, 5, 2), (5, 5, 5), (1, 1, 1), (5, 5, 4)])
@pytest.mark.parametrize("packing", [AFFINE[6], AFFINE[15], PACKINGS[-1]], ids=str)
def test_products_leave_out_the_rows_that_are_not_asked_for(packing: Packing, counts: tuple[int, ...]) -> None:
    """Those that are asked for are equal to the bit; the others are zeros."""
    x, residual, first, second = (mx.random.normal(shape) for shape in ((3, 5, 64), (3, 5, 96), (96, 64), (96, 64)))
    gates, values = packing.of(first), packing.of(second)

    def all_forms() -> list[mx.array]:
        y, gate = packing.times(x, values), packing.times(x, gates)
        turned = packing.times(x.swapaxes(0, 1), values)
        forms = [y, residual + packing.times(x, values), gate * mx.sigmoid(gate) * packing.times(x, values), turned]
        mx.eval(forms)
        return forms

    whole = all_forms()
    with cpu.asks_for(counts, 5):
        found = all_forms()
    assert mx.array_equal(found[-1], whole[-1]), "another shape is left alone"
    for part, wanted in zip(found[:-1], whole[:-1], strict=True):
        for row, count in enumerate(counts):
            assert mx.array_equal(part[row, :count], wanted[row, :count])
            assert not mx.any(part[row, count:])
    assert mx.array_equal(all_forms()[0], whole[0]), "all are asked for again"


@pytest.mark.parametrize("counts", [(1, 5, 2), (5, 5, 5), (1, 1, 1)])
def test_attention_leaves_out_the_queries_that_are_not_asked_for(counts: tuple[int, ...]) -> None:
    q, k, v = (mx.random.normal((3, heads, tokens, 16)) for heads, tokens in ((4, 5), (2, 9), (2, 9)))
    mask = mx.random.uniform(shape=(3, 1, 5, 9)) < 0.8
    whole = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
    with cpu.asks_for(counts, 5):
        found = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
    for row, count in enumerate(counts):
        assert mx.array_equal(found[row, :, :count], whole[row, :, :count])
        assert not mx.any(found[row, :, count:])
