import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from runner.sampling import SamplingOptions, filters
from runner.sampling.filters import TopKBySort, top_k_by_id
from runner.sampling.sampler import Sampler, SamplerBatch
from tests.unit.sampling import reference

EVERYTHING = SamplingOptions(
    temperature=0.9,
    top_k=20,
    top_p=0.9,
    min_p=0.02,
    repeat_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    repeat_last_n=5,
    seed=3,
    logprobs=True,
    top_logprobs=4,
)


def tokens(options: SamplingOptions, logits: mx.array, count: int) -> list[int]:
    sampler = Sampler(options, [], logits.shape[-1], 4096)
    return [reference.only(sampler(logits).token) for _ in range(count)]


def test_what_a_request_asks_for_needs_no_mlx() -> None:
    code = "import sys, runner.sampling, runner.engine.engine; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


def test_without_a_temperature_everything_else_is_ignored() -> None:
    logits = mx.random.normal((1, 200), key=mx.random.key(4))
    best = reference.only(mx.argmax(logits, axis=-1))
    for seed in (1, 2, None):
        options = SamplingOptions(top_k=50, top_p=0.99, min_p=0.01, seed=seed)
        assert tokens(options, logits, 20) == [best] * 20


def test_greedy_takes_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("runner.sampling.sampler.Uniforms.take_next")
    assert tokens(SamplingOptions(seed=1), mx.array([[0.0, 1.0]]), 1) == [1]


def test_seeded_sequences_of_the_protocol() -> None:
    uniform = mx.zeros((1, 4))
    assert tokens(SamplingOptions(temperature=1, seed=1234), uniform, 12) == [1, 0, 1, 1, 0, 1, 0, 2, 2, 1, 3, 2]
    assert tokens(SamplingOptions(temperature=1, seed=5678), uniform, 12) == [2, 2, 0, 1, 3, 0, 0, 1, 3, 0, 0, 0]


def candidates(scores: reference.Row, k: int, order: object) -> NDArray[np.int64]:
    """Returns the ids of the k best in this order; all ids in order if k is off."""
    if not 0 < k < len(scores):
        return np.arange(len(scores))
    best = np.argsort(-scores, kind="stable")[:k]
    return best if order is TopKBySort else np.sort(best)


def literally(scores: reference.Row, options: SamplingOptions, key: mx.array, order: object) -> int:
    """Follows steps 3 to 7 of the section literally; MLX draws from log-probabilities of the ordered candidates."""
    ids = candidates(scores, options.top_k, order)
    probabilities = reference.probabilities(scores[ids], options.temperature)
    if options.top_p:
        falling = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[falling]) - probabilities[falling]
        probabilities[falling[before >= options.top_p]] = 0
    if options.min_p:
        probabilities[probabilities < options.min_p * probabilities.max()] = 0
    p = (probabilities / probabilities.sum()).astype(np.float32)
    log_probabilities = np.where(p > 0, np.log(np.maximum(p, 1e-20)), -np.inf).astype(np.float32)
    return int(ids[reference.only(mx.random.categorical(mx.array(log_probabilities[None]), key=key))])


@pytest.mark.parametrize("order", [top_k_by_id, TopKBySort])
@pytest.mark.parametrize("at_once", [1 << 20, 16])
@pytest.mark.parametrize("vocabulary", [3, 64, 257, 6000])
def test_draws_are_those_of_mlx_from_the_filtered_log_probabilities(
    vocabulary: int, at_once: int, order: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "_SORTED_AT_ONCE", {mx.cpu: at_once, mx.gpu: at_once})
    monkeypatch.setattr("runner.sampling.sampler.top_k", order)
    generator = np.random.default_rng(vocabulary)
    for seed in range(20):
        options = SamplingOptions(
            temperature=float(generator.choice([0.2, 0.8, 1.0, 3.0])),
            top_k=int(generator.choice([0, 2, 40])),
            top_p=float(generator.choice([0, 0.3, 0.9])),
            min_p=float(generator.choice([0, 0.05, 0.4])),
            seed=seed,
        )
        sampler = Sampler(options, [], vocabulary, 64)
        for number in range(3):
            scores = generator.normal(size=vocabulary).astype(np.float32) * 4
            key = mx.random.key(reference.splitmix64(seed, number))
            assert sampler(mx.array(scores[None])).token.item() == literally(scores, options, key, order), options


def test_a_token_that_the_model_rules_out_is_never_drawn() -> None:
    logits = mx.array([[-np.inf, 1.0, -np.inf, 1.0, -np.inf]])
    for options in (SamplingOptions(temperature=5), SamplingOptions(temperature=5, top_k=4, top_p=0.99, min_p=0.001)):
        assert set(tokens(options, logits, 60)) == {1, 3}


def test_huge_logits_and_tiny_temperatures_stay_finite() -> None:
    logits = mx.array([[1e30, 3e30, -3e30, 2e30]])
    for temperature in (1e-30, 1e-3, 1e3):
        assert set(tokens(SamplingOptions(temperature=temperature, top_p=0.9), logits, 5)) == {1}


def operations(sampler: Sampler | SamplerBatch, rows: int, steps: int, path: Path) -> list[int]:
    """Returns the number of operations of each of `steps` steps. `path` is for graphs."""
    logits = mx.random.normal((rows, 64), key=mx.random.key(2))
    mx.eval(logits)
    sizes = []
    for _ in range(steps):
        arrays = sampler(logits).arrays()
        mx.export_to_dot(str(path), *arrays)
        sizes.append(path.read_text().count("label ="))
        mx.eval(arrays)
    return sizes


@pytest.mark.parametrize("last_n", [5, -1])
def test_the_graph_of_a_step_does_not_grow(last_n: int, tmp_path: Path) -> None:
    sampler = Sampler(replace(EVERYTHING, repeat_last_n=last_n), [1, 2, 3], 64, 4096)
    sizes = operations(sampler, 1, 200, tmp_path / "graph.dot")
    assert max(sizes[150:]) <= max(sizes[:70])  # a block of random numbers is made every 64 steps


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_tokens_and_values_have_one_type_whatever_the_model_has(dtype: mx.Dtype) -> None:
    for options in (EVERYTHING, SamplingOptions(), SamplingOptions(temperature=1)):
        sample = Sampler(options, [1], 64, 64)(mx.zeros((1, 64), dtype=dtype))
        assert (sample.token.dtype, sample.token.shape) == (mx.uint32, (1,))
    sample = Sampler(EVERYTHING, [1], 64, 64)(mx.zeros((1, 64), dtype=dtype))
    _, logprob, top_ids, top_logprobs = sample.arrays()
    assert (logprob.dtype, logprob.shape) == (mx.float32, (1,))
    assert logprob.tolist() == pytest.approx([-np.log(64)], abs=1e-4)  # summed in float32, too
    assert (top_ids.dtype, top_ids.shape) == (mx.uint32, (1, 4))
    assert (top_logprobs.dtype, top_logprobs.shape) == (mx.float32, (1, 4))
