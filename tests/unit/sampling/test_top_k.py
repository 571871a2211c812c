"""The order of the candidates: by id on a CPU and, on any device, by falling score as on a GPU."""

import mlx.core as mx
import numpy as np
import pytest

from runner.sampling import SamplingOptions
from runner.sampling.filters import TopKBySort, top_k, top_k_by_id
from runner.sampling.sampler import Sampler, SamplerBatch


def scored(vocabulary: int, values: int) -> mx.array:
    """Returns scores [4, V] with few different values (ties) or many; with extremes at the ends, with most of
    the vocabulary ruled out, and with nothing but ties."""
    generator = np.random.default_rng(vocabulary)
    scores = generator.integers(0, values, (4, vocabulary)).astype(np.float32)
    scores[0, [-1, vocabulary // 2]] = 1 << 31
    scores[1, : vocabulary - vocabulary // 3] = -np.inf
    scores[2, min(vocabulary // 32 * 32, vocabulary - 1)] = 1 << 31  # the first that is in no team
    scores[3] = 0
    return mx.array(scores)


@pytest.mark.parametrize("vocabulary", [3, 64, 65, 640, 5003, 5120, 32768])
@pytest.mark.parametrize("k", [1, 2, 40])
@pytest.mark.parametrize("values", [3, 1 << 30])
def test_the_order_of_a_cpu_is_by_id_that_of_a_gpu_by_falling_score(vocabulary: int, k: int, values: int) -> None:
    k = min(k, vocabulary - 1)
    scores = scored(vocabulary, values)
    expected = np.argsort(-np.array(scores), axis=-1, kind="stable")[:, :k]
    assert TopKBySort(k, vocabulary)(scores).tolist() == expected.tolist()
    ids = np.array(top_k_by_id(k, vocabulary)(scores))
    assert (np.diff(ids.astype(np.int64)) > 0).all()
    # Of equal scores at the border, any may be in.
    found, best = (np.take_along_axis(np.array(scores), each, axis=-1) for each in (ids, expected))
    assert (-np.sort(-found, axis=-1)).tolist() == best.tolist()


@pytest.mark.parametrize(("device", "order"), [(mx.cpu, [1, 6]), (mx.gpu, [6, 1])])
def test_each_device_has_its_own_order(
    device: mx.DeviceType, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    find = top_k(2, 8)
    monkeypatch.undo()
    assert find(mx.array([[0.0, 3, 1, 1, 1, 1, 4, 1]])).tolist() == [order]


def test_a_gpu_does_not_sort_a_large_vocabulary_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    sort = mx.argsort

    def watched(scores: mx.array, axis: int) -> mx.array:
        sizes.append(scores.shape[-1])
        return sort(scores, axis=axis)

    monkeypatch.setattr(mx, "argsort", watched)
    for vocabulary in (4096, 32768):
        TopKBySort(40, vocabulary)(mx.zeros((1, vocabulary)))
    assert sizes == [4096, 32768 // 32, 40 * 32]


@pytest.mark.parametrize("order", [top_k_by_id, TopKBySort])
def test_rounding_does_not_change_what_a_seed_draws(order: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a prompt from the cache, or in a batch, logits are those of an answer alone but for their last digits."""
    monkeypatch.setattr("runner.sampling.sampler.top_k", order)
    rows, vocabulary = 128, 32768
    logits = mx.random.normal((rows, vocabulary), key=mx.random.key(1)) * 4
    noise = mx.random.normal((rows, vocabulary), key=mx.random.key(2)) * 1e-5

    def drawn(logits: mx.array) -> list[int]:
        wishes = (SamplingOptions(temperature=0.8, top_k=40, seed=seed) for seed in range(rows))
        batch = SamplerBatch([Sampler(wish, [], vocabulary, 64) for wish in wishes])
        return [choice.token for choice in batch(logits).read()]

    assert drawn(logits) == drawn(logits + noise)
