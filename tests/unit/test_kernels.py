"""The kernels compute what MLX does, each row by itself, and read nothing beside their arrays."""

import math
import platform
from collections.abc import Callable, Iterator
from functools import partial, reduce
from itertools import product
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import runner.process.lean_mlx_lm  # noqa: F401
from runner import cpu
from tests.lib.kernels import calls, mlx_own, use

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


def assert_as_mlx(compute: Callable[[], mx.array], most: float) -> None:
    """Compares the result of the kernels with that of MLX, up to an error of `most` relative to the largest number."""
    found, wanted = by_kernels(compute), by_mlx(compute)
    assert found.dtype == wanted.dtype
    assert_close(found, wide(wanted), most)


def attend(
    q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, scale: float = 0.2, sinks: Any = None
) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


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
    for dtype, most in ((None, 2e-3), (mx.float32, 2e-3), (mx.bfloat16, 8e-3), (mx.float16, 2e-3)):
        assert_as_mlx(partial(packing.unpacked, taken, dtype), most)


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


BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "a head for each": ((2, 3, 5), (2, 3)),
    "heads that share": ((2, 3, 4, 5), (2, 3, 1)),
    "one sequence": ((1, 1, 1), (1, 1)),
    "latents for all heads": ((2, 1, 5), (3,)),
    "queries of each head": ((2, 3, 5), (3,)),
    "each with each": ((2, 1, 3, 1, 5), (2, 1, 3)),
    "rows for all": ((5,), (2, 3)),
    "many rows": ((1, 1, 100), (3,)),
}
"""The leading axes of rows, their number last; those of packed matrices."""


@pytest.mark.parametrize("packing", [PACKINGS[6], PACKINGS[7], PACKINGS[12], PACKINGS[16], PACKINGS[18]], ids=str)
@pytest.mark.parametrize("form", BATCHES)
@pytest.mark.parametrize("keys", [1, 64, 200])
def test_products_with_packed_matrices_are_those_with_what_they_stand_for(
    packing: Packing, form: str, keys: int
) -> None:
    """Within larger buffers, as caches have them. Rows are equal alone and on any number of threads."""
    leading, matrices = BATCHES[form]
    room = [part[..., :keys, :] for part in packing.of(made(*matrices, keys + 30, 128))]
    for transpose, width in ((True, 128), (False, keys)):
        x = made(*leading[:-1], leading[-1] + 2, width, seed=1)[..., : leading[-1], :]
        found = by_kernels(partial(packing.times, x, room, transpose=transpose))
        weights = wide(packing.weights(room))
        wanted = wide(packing.taken(x)) @ weights.swapaxes(-1, -2) if transpose else wide(x) @ weights
        assert_close(found, wanted, 2e-6)
        assert mx.array_equal(packing.times(x[..., :1, :], room, transpose=transpose), found[..., :1, :])
        use(16, 3, 3)
        assert mx.array_equal(packing.times(x, room, transpose=transpose), found)
        use(16, 1, 1)


class Heads(NamedTuple):
    queries: int
    keys: int
    d: int
    dv: int


HEADS = [Heads(9, 3, 64, 64), Heads(8, 8, 128, 128), Heads(12, 1, 80, 80), Heads(4, 4, 192, 128), Heads(2, 2, 20, 12)]


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
    compute = partial(attend, q, k, v, mask=chosen, sinks=sink)
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
    found = by_kernels(lambda: attend(q, k, v, mask=nothing, scale=1.0))
    assert_close(found, np.broadcast_to(wide(v).mean(2, keepdims=True), found.shape), 1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_the_same_wherever_a_prompt_is_cut(heads: Heads) -> None:
    q, k = made(1, heads.queries, 150, heads.d), made(1, heads.keys, 150, heads.d)
    v = made(1, heads.keys, 150, heads.dv)
    whole = attend(q, k, v, mask="causal")
    for threads, step in product((1, 3), (1, 7, 64, 100)):
        use(16, threads, threads)
        cuts = [(begin, min(150, begin + step)) for begin in range(0, 150, step)]
        parts = [attend(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], mask="causal") for begin, end in cuts]
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
        together = attend(q, k, v, mask=mask)
        for row, (count, first) in enumerate(places):
            at = (first + mx.arange(count)) % columns
            own = [x[row : row + 1, :, at] for x in (k, v)]
            alone = attend(q[row : row + 1], *own, mask="causal")
            assert mx.array_equal(together[row], alone[0]), (queries, count, first)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window", [5, 70])
def test_attention_in_a_window_is_that_over_its_keys_alone(heads: Heads, dtype: str, window: int) -> None:
    q, k = made(1, heads.queries, 40, heads.d, dtype=dtype), made(1, heads.keys, 100, heads.d, seed=1, dtype=dtype)
    v = made(1, heads.keys, 100, heads.dv, seed=2, dtype=dtype)
    mask = mx.array(np.tri(40, 100, 60, dtype=bool) & ~np.tri(40, 100, 60 - window, dtype=bool))
    together = attend(q, k, v, mask=mask)
    for query in range(40):
        seen = slice(max(0, 61 + query - window), 61 + query)
        alone = attend(q[:, :, query : query + 1], k[:, :, seen], v[:, :, seen])
        assert mx.array_equal(together[:, :, query : query + 1], alone)


def test_attention_over_a_window_that_has_wrapped_begins_with_its_oldest_keys() -> None:
    layer, q = RotatingKVCache(130), made(1, 4, 1, 64)
    k, v = made(1, 2, 300, 64, seed=1), made(1, 2, 300, 64, seed=2)
    layer.update_and_fetch(k[:, :, :100], v[:, :, :100])
    for token in range(100, 300):
        new, seen = slice(token, token + 1), slice(max(0, token - 129), token + 1)
        kept = layer.update_and_fetch(k[:, :, new], v[:, :, new])
        found = attend(q, *kept)
        assert mx.array_equal(found, attend(q, k[:, :, seen], v[:, :, seen]))
        assert mx.array_equal(attend(q, *kept), found), "by another layer: they are evaluated now"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 31, 577])
def test_norms_are_those_of_mlx(dtype: str, width: int) -> None:
    x = made(2, 3, width, dtype=dtype).transpose(1, 0, 2)
    for weight in (None, made(width, seed=1, dtype=dtype), made(width, seed=1)):
        assert_as_mlx(partial(mx.fast.rms_norm, x, weight, 1e-5), FLOATS[dtype])


NORMED: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "a number": lambda norm, _: 0.3 * norm,
    "a number behind it": lambda norm, _: norm * mx.array(0.3),
    "silu": lambda norm, z: (z * mx.sigmoid(z)) * norm,
    "silu behind it": lambda norm, z: norm * (z * mx.sigmoid(z)),
    "a gate": lambda norm, z: norm * mx.sigmoid(z),
    "a residual": lambda norm, z: z + norm,
    "a residual behind it": lambda norm, z: norm + z,
}
"""Products of a norm and a factor, and sums."""


@pytest.mark.parametrize("form", NORMED)
@pytest.mark.parametrize("weighted", [False, True])
def test_what_follows_a_norm_is_computed_with_it_to_the_same_bits(form: str, weighted: bool) -> None:
    x, z, weight = made(40, 2, 70).swapaxes(0, 1), made(2, 40, 90, seed=2)[..., 5:75], made(70, seed=1)

    def norm() -> mx.array:
        return mx.fast.rms_norm(x, 1.0 + weight if weighted else None, 1e-5)

    mx.eval(x, z, weight)
    before = calls()
    mx.eval(fused := NORMED[form](norm(), z))
    assert calls() == before + 1
    mx.eval(alone := norm(), half := 0.5 * norm())
    assert mx.array_equal(fused, NORMED[form](alone, z))
    assert_close(fused, wide(by_mlx(lambda: NORMED[form](norm(), z))), 2e-6)
    assert_close(norm() + z[0, 0], wide(alone) + wide(z[0, 0]), 2e-6)
    for others in (z[:1, :1], z[0, 0, 0], mx.exp(z[0, 0, 0]), 2 * mx.fast.rms_norm(z, None, 1e-5)):
        assert_close(NORMED[form](0.5 * norm(), z) * others, wide(NORMED[form](half, z)) * wide(others), 2e-6)


PERIODS = mx.array(np.random.default_rng(0).uniform(1, 1e4, 32).astype(np.float32))
TURN: dict[str, Any] = {"dims": 64, "traditional": False, "base": 1e4, "scale": 1.0, "offset": 5}
TURNS: dict[str, dict[str, Any]] = {
    "halves": {},
    "neighbours": {"traditional": True, "scale": 0.5, "offset": 3},
    "some dimensions": {"dims": 32, "base": 1e6, "offset": 90},
    "an offset for each sequence": {"offset": mx.array([5, 99])},
    "periods": {"base": None, "offset": 7, "freqs": PERIODS},
}
"""The differences of some rotations from TURN."""


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("turn", TURNS)
def test_rotary_positions_are_those_of_mlx(dtype: str, turn: str) -> None:
    x = made(2, 7, 3, 64, dtype=dtype).transpose(0, 2, 1, 3)
    assert_as_mlx(lambda: mx.fast.rope(x, **TURN | TURNS[turn]), max(1e-5, FLOATS[dtype]))


FUNCTIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "sigmoid": mx.sigmoid,
    "tanh": mx.tanh,
    "exp": mx.exp,
    "softplus": lambda x: mx.logaddexp(x, 0),
    "silu": lambda x: x * mx.sigmoid(x),
    "silu, the other way round": lambda x: mx.sigmoid(x) * x,
    "expm1": mx.expm1,
    "expm1, near 0": lambda x: mx.expm1(x * 0.1),
    "erf": mx.erf,
    "gelu": lambda x: x * (1 + mx.erf(x / 2**0.5)) / 2,
    "gelu, roughly": lambda x: 0.5 * x * (1 + mx.tanh(0.8 * (x + 0.044715 * x**3))),
    "a soft cap": lambda x: mx.tanh(x / 30) * 30,
    "clamped": lambda x: mx.clip(x, -1, 2) + mx.clip(x, 0.5, None),
    "the square of what is positive": lambda x: mx.square(mx.maximum(x, 0.0)),
    "constants first": lambda x: 3 - (1 / x) + mx.minimum(2.0, -x),
    "many steps": lambda x: reduce(lambda y, step: mx.maximum(y * 0.9 - step, x), range(20), x),
    "gated": lambda x: (x * mx.sigmoid(x)) * (x + 1),
    "gated in columns": lambda x: (x * mx.sigmoid(x)) * mx.contiguous((x + 1).T).T,
    "a gate": lambda x: (x + 1) * mx.sigmoid(x),
    "a gate before it": lambda x: mx.sigmoid(x) * (x + 1),
    "gated before it": lambda x: (x + 1) * (x * mx.sigmoid(x)),
    "softmax": lambda x: mx.softmax(x, axis=-1),
    "softmax of parts of rows": lambda x: mx.softmax(x[:, 1:], axis=-1, precise=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_mlx(name: str) -> None:
    """Numbers beyond all others, too."""
    numbers = [4 * made(3, width + 1) for width in (1, 7, 1003)]
    for x in (*numbers, *[mx.array(SPECIAL)] * ("softmax" not in name)):
        mx.eval(x)
        compute = partial(FUNCTIONS[name], x)
        found, wanted = wide(by_kernels(compute)), wide(by_mlx(compute))
        special = x.ndim == 1
        if name in ("erf", "gelu"):  # MLX's own error function has a larger error
            erf = np.vectorize(math.erf)(wide(x) / (1 if name == "erf" else 2**0.5))
            with np.errstate(invalid="ignore"):
                wanted = erf if name == "erf" else wide(x) * (1 + erf) / 2
        assert np.allclose(found, wanted, rtol=2e-6, atol=1e-8 if special else 1e-7, equal_nan=special)


def test_what_is_not_seen_changes_no_bit_of_a_softmax() -> None:
    x = made(3, 70)
    for seen in (1, 5, 16, 33):
        hidden = mx.where(mx.arange(70) < seen, x, -mx.inf)
        assert mx.array_equal(mx.softmax(x[:, :seen], axis=-1), mx.softmax(hidden, axis=-1)[:, :seen])


@pytest.mark.parametrize("name", ["gelu", "gelu, roughly", "a soft cap", "clamped"])
def test_a_function_takes_its_steps_at_once_and_the_same_for_each_number(name: str) -> None:
    x = 4 * made(5, 9001)
    mx.eval(x)
    before = calls()
    whole = by_kernels(lambda: FUNCTIONS[name](x))
    assert calls() == before + 1
    for threads in (1, 3):
        use(16, threads, threads)
        assert mx.array_equal(FUNCTIONS[name](x), whole)
        assert mx.array_equal(FUNCTIONS[name](x[1:3, 5:50]), whole[1:3, 5:50])


def test_a_function_may_take_the_place_of_numbers_that_nobody_else_needs() -> None:
    x = mx.contiguous(made(70, 700))
    kept = x * 2
    mx.eval(kept)
    assert mx.array_equal(mx.sigmoid(mx.negative(kept)), mx.sigmoid(-2 * x))
    assert mx.array_equal(kept, x + x)


@pytest.mark.parametrize("width", [1, 31, 577])
@pytest.mark.parametrize("parts", ["neither", "weight", "bias", "both"])
def test_layer_norms_are_those_of_mlx(width: int, parts: str) -> None:
    x = 3 + made(2, 40, width).transpose(1, 0, 2)
    weight = None if parts in ("neither", "bias") else made(width, seed=1)
    bias = None if parts in ("neither", "weight") else made(width, seed=2)
    assert_as_mlx(partial(mx.fast.layer_norm, x, weight, bias, 1e-5), 2e-6)
    whole = mx.fast.layer_norm(x, weight, bias, 1e-5)
    assert mx.array_equal(mx.fast.layer_norm(x[7:8, 1:], weight, bias, 1e-5), whole[7:8, 1:])


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
    "a gate by another function": lambda _, y, z: z * FUNCTIONS["gelu"](y),
    "a gate by a sum with itself": lambda _, y, z: z * FUNCTIONS["gelu, roughly"](y),
    "a bias": lambda x, y, _: y + x[0],
    "a bias and a residual": lambda x, y, _: x + (y + x[0]),
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
    scale = mx.array(0.7)
    parts = packing.of(made(30, 128, seed=2))

    def loss(x: mx.array, weight: mx.array, scale: mx.array) -> mx.array:
        y = packing.times(mx.fast.rms_norm(x, weight, 1e-5), parts)
        y = mx.fast.layer_norm(mx.erf(2 - y * scale), weight[:30], None, 1e-5)
        gated = (y * mx.sigmoid(y)) * packing.times(x, parts)
        joined = mx.concatenate([gated + packing.times(x, parts)] * 40, axis=1)
        normed = 0.5 * mx.fast.rms_norm(y, None, 1e-5) + mx.fast.rms_norm(y, None, 1e-5) * mx.sigmoid(y)
        return joined.square().mean() + (normed * (y * mx.sigmoid(y))).mean()

    gradient = mx.grad(loss, argnums=(0, 1, 2))
    for found, wanted in zip(gradient(x, weight, scale), by_mlx(lambda: gradient(x, weight, scale)), strict=True):
        assert_close(found, wide(wanted), 1e-5)


X, PARTS = made(4, 128), PACKINGS[7].of(made(128, 128))
OTHERS: dict[str, Callable[[], mx.array]] = {
    "the weights are not transposed": lambda: PACKINGS[7].times(X, PARTS, transpose=False),
    "sigmoid of halves": lambda: mx.sigmoid(X.astype(mx.float16)),
    "softmax of columns": lambda: mx.softmax(X, axis=0),
    "nothing": lambda: mx.fast.rms_norm(X[:0], None, 1e-5),
    "a norm of halves": lambda: mx.fast.layer_norm(X.astype(mx.float16), None, None, 1e-5),
    "a power that is no square or cube": lambda: mx.power(X, 2.5),
    "a number of another type": lambda: mx.maximum(X, mx.array(1, mx.int32)),
    "a number for more axes": lambda: mx.divide(X, mx.ones((1, 1, 1))),
    "columns": lambda: mx.subtract(X, X[:, :1]),
    "a join with nothing": lambda: mx.concatenate([mx.zeros((64, 128)), X[:0]]),
    "a join of two types": lambda: mx.concatenate([mx.zeros((64, 128)), mx.zeros((64, 128), mx.float16)]),
    "a join of one": lambda: mx.concatenate([mx.zeros((64, 128))]),
    "another logarithm of a sum": lambda: mx.logaddexp(X, 1),
    "complex numbers": lambda: mx.exp(X.astype(mx.complex64)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_the_kernels_do_not_know_is_left_to_mlx(case: str) -> None:
    before = calls()
    mx.eval(OTHERS[case]())
    assert calls() == before


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
    whole = attend(q, k, v, mask=mask)
    with cpu.asks_for(counts, 5):
        found = attend(q, k, v, mask=mask)
    for row, count in enumerate(counts):
        assert mx.array_equal(found[row, :, :count], whole[row, :, :count])
        assert not mx.any(found[row, :, count:])
