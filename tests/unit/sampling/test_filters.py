from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.sampling import filters
from tests.unit.sampling import reference


def kept(weights: mx.array) -> set[int]:
    return set(np.flatnonzero(np.array(weights)[0]).tolist())


@pytest.fixture(params=[1 << 20, 4, 1], ids=["sorted at once", "halved to 4", "halved to 1"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "_SORTED_AT_ONCE", {mx.cpu: request.param, mx.gpu: request.param})


# Sixteenths and their sums are exact in float32, so the reference can be exact too.
sixteenths = st.lists(st.integers(0, 16), min_size=1, max_size=40).filter(any)


@pytest.mark.usefixtures("at_once")
@given(sixteenths, st.integers(1, 63))
def test_top_p_keeps_exactly_the_nucleus_ties_by_place(weights: list[int], p: int) -> None:
    row = mx.array([weights]) / 16
    expected = reference.nucleus([Fraction(weight, 16) for weight in weights], Fraction(p, 64))
    # A token of probability zero may stay or not: it is never drawn.
    assert kept(filters.TopP([p / 64], len(weights))(row)) == {token for token in expected if weights[token]}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("p", [1e-30, 1e-4])
@pytest.mark.parametrize("seed", range(3))
def test_at_least_the_most_probable_token_stays(p: float, seed: int) -> None:
    # The sums of the halves and of the whole differ in their last digits, another way for every seed.
    weights = np.random.default_rng(seed).random(1000, dtype=np.float32)
    weights[417] = 1.5
    assert kept(filters.TopP([p], 1000)(mx.array(weights[None]))) == {417}


@pytest.mark.usefixtures("at_once")
def test_a_top_p_of_one_keeps_everything() -> None:
    weights = mx.array([[1e-30, 0.5, 1.0, 1e-12, 0.25]])
    assert filters.TopP([1.0], 5)(weights).tolist() == weights.tolist()


@pytest.mark.parametrize("vocabulary", [5001, 32768])
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_top_p_of_a_large_vocabulary_is_the_nucleus(vocabulary: int, p: float) -> None:
    scores = np.random.default_rng(vocabulary).normal(size=vocabulary).astype(np.float32) * 3
    probabilities = reference.probabilities(scores, 1.0)
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    surely, perhaps = set(order[before < p - 1e-5].tolist()), set(order[before < p + 1e-5].tolist())
    found = kept(filters.TopP([p], vocabulary)(mx.softmax(mx.array(scores[None]), axis=-1)))
    assert surely <= found <= perhaps
    assert len(perhaps) - len(surely) < 2 + len(surely) // 50


@given(sixteenths, st.integers(1, 16))
def test_min_p_drops_what_is_strictly_below_the_share_of_the_best(weights: list[int], p: int) -> None:
    best = max(weights)
    row = np.array([weights], dtype=np.float32) / np.float32(best)
    expected = {token for token, weight in enumerate(row[0].tolist()) if weight >= p / 16}
    assert kept(filters.min_p(mx.array(row), mx.array([[p / 16]]))) == expected
