import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import runner.sampling
from runner.sampling import SamplingOptions, filters, row_group
from runner.sampling.draw import draw
from runner.sampling.sample import Sample
from runner.sampling.sampler import Sampler
from runner.sampling.top_k import TopKById, TopKBySort
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


def test_the_public_names() -> None:
    assert runner.sampling.__all__ == ["SamplingOptions"]


def test_what_a_request_asks_for_needs_no_mlx() -> None:
    code = "import sys, runner.sampling, runner.engine.engine; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


def test_equal_maxima_give_the_lowest_id() -> None:
    assert tokens(SamplingOptions(), mx.array([[1.0, 7, 7, 7]]), 2) == [1, 1]


def test_without_a_temperature_everything_else_is_ignored() -> None:
    logits = mx.random.normal((1, 200), key=mx.random.key(4))
    best = reference.only(mx.argmax(logits, axis=-1))
    for seed in (1, 2, None):
        options = SamplingOptions(top_k=50, top_p=0.99, min_p=0.01, seed=seed)
        assert tokens(options, logits, 20) == [best] * 20


def test_greedy_takes_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("runner.sampling.row_group.Uniforms.take")
    assert tokens(SamplingOptions(seed=1), mx.array([[0.0, 1.0]]), 1) == [1]


def test_seeded_sequences_of_the_protocol() -> None:
    uniform = mx.zeros((1, 4))
    assert tokens(SamplingOptions(temperature=1, seed=1234), uniform, 12) == [1, 0, 1, 1, 0, 1, 0, 2, 2, 1, 3, 2]
    assert tokens(SamplingOptions(temperature=1, seed=5678), uniform, 12) == [2, 2, 0, 1, 3, 0, 0, 1, 3, 0, 0, 0]


@pytest.mark.parametrize(
    ("seed", "of_4", "of_6"),
    [
        (1234, [6, 6, 6, 6, 6, 6, 6, 1, 4, 6, 4, 1], [6, 6, 6, 6, 6, 6, 6, 6, 1, 6, 4, 6]),
        (5678, [1, 1, 6, 6, 3, 6, 6, 6, 4, 6, 6, 6], [1, 6, 6, 6, 4, 6, 6, 6, 4, 6, 6, 6]),
    ],
)
def test_seeded_sequences_of_candidates_by_falling_score(
    seed: int, of_4: list[int], of_6: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # From mx.random.categorical and the keys of the protocol; the candidates are 6, 1, 4, 3, and 7 and 0 behind these.
    monkeypatch.setattr(row_group, "top_k", TopKBySort)
    logits = mx.array([[0.25, 2.0, -1.0, 1.5, 2.0, 0.0, 3.0, 1.0]])
    assert tokens(SamplingOptions(temperature=1, top_k=4, seed=seed), logits, 12) == of_4
    assert tokens(SamplingOptions(temperature=0.8, top_k=6, top_p=0.9, seed=seed), logits, 12) == of_6


def test_a_seed_fixes_the_sequence_and_another_one_changes_it() -> None:
    logits = mx.random.normal((1, 500), key=mx.random.key(1))
    first, again = (tokens(SamplingOptions(temperature=1, seed=7), logits, 30) for _ in range(2))
    assert first == again
    assert tokens(SamplingOptions(temperature=1, seed=8), logits, 30) != first
    assert tokens(SamplingOptions(temperature=1, seed=0), logits, 30) == tokens(
        SamplingOptions(temperature=1, seed=0), logits, 30
    )


@pytest.mark.parametrize("seed", [None, -1])
def test_without_a_seed_no_two_requests_are_alike(seed: int | None) -> None:
    logits = mx.random.normal((1, 500), key=mx.random.key(1))
    first, again = (tokens(SamplingOptions(temperature=1, seed=seed), logits, 30) for _ in range(2))
    assert first != again


def test_top_k_of_one_is_the_best_token() -> None:
    assert set(tokens(SamplingOptions(temperature=1, top_k=1), mx.array([[1.0, 5, 4]]), 50)) == {1}


def test_filters_leave_only_the_best_of_three() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.2]]))
    assert set(tokens(SamplingOptions(temperature=1, top_p=0.4), logits, 50)) == {0}
    assert set(tokens(SamplingOptions(temperature=1, min_p=0.7), logits, 50)) == {0}
    assert set(tokens(SamplingOptions(temperature=1, min_p=0.5), logits, 100)) == {0, 1}


def test_top_p_counts_the_probabilities_that_top_k_left() -> None:
    logits = mx.log(mx.array([[0.6, 0.2, 0.2]]))
    assert set(tokens(SamplingOptions(temperature=1, top_k=2, top_p=0.7), logits, 50)) == {0}
    assert set(tokens(SamplingOptions(temperature=1, top_p=0.7), logits, 100)) == {0, 1}


def test_top_p_counts_the_probabilities_after_the_temperature() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.2]]))
    assert set(tokens(SamplingOptions(temperature=0.1, top_p=0.9), logits, 50)) == {0}


def test_min_p_is_not_affected_by_what_top_p_removed() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.2]]))
    assert set(tokens(SamplingOptions(temperature=1, top_p=0.7, min_p=0.35), logits, 100)) == {0, 1}


def test_frequencies_are_the_probabilities() -> None:
    weights = np.array([0.05, 0.4, 0.15, 0.3, 0.1])
    draws = 4000
    sampler = Sampler(SamplingOptions(temperature=2, seed=11), [], 5, 64)
    logits = mx.array(np.log(weights)[None].astype(np.float32)) * 2
    drawn = [sampler(logits).token for _ in range(draws)]
    counts = np.bincount(np.array(mx.concatenate(drawn)), minlength=5)
    chi_square = float((((counts - draws * weights) ** 2) / (draws * weights)).sum())
    assert chi_square < 18.5  # 0.1 % of right samplers exceed this with 4 degrees of freedom; the seed is fixed


CandidateOrder = type[TopKById] | type[TopKBySort]


def candidates(scores: reference.Row, k: int, order: CandidateOrder) -> NDArray[np.int64]:
    """Returns the ids of the k best in this order; all ids in order if k is off."""
    if not 0 < k < len(scores):
        return np.arange(len(scores))
    best = np.argsort(-scores, kind="stable")[:k]
    return best if order is TopKBySort else np.sort(best)


def literally(scores: reference.Row, options: SamplingOptions, key: mx.array, order: CandidateOrder) -> int:
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


@pytest.mark.parametrize("order", [TopKById, TopKBySort])
@pytest.mark.parametrize("at_once", [1 << 20, 16])
@pytest.mark.parametrize("vocabulary", [3, 64, 257, 6000])
def test_draws_are_those_of_mlx_from_the_filtered_log_probabilities(
    vocabulary: int, at_once: int, order: CandidateOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "_SORTED_AT_ONCE", {mx.cpu: at_once, mx.gpu: at_once})
    monkeypatch.setattr(row_group, "top_k", order)
    generator = np.random.default_rng(vocabulary)
    for seed in range(60):
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


def test_a_filtered_token_is_never_drawn() -> None:
    weights = mx.array([[0.0, 0.0, 1.0, 0.0, 3.0, 0.0, 0.0]])
    for uniform in (0.0, 0.2499999, 0.25, 0.75, 1 - 2**-24):
        assert draw(weights, mx.array([[uniform]])).item() in (2, 4)
    assert draw(weights, mx.array([[0.2499999]])).item() == 2
    assert draw(weights, mx.array([[0.25]])).item() == 4


def test_a_token_that_the_model_rules_out_is_never_drawn() -> None:
    logits = mx.array([[-np.inf, 1.0, -np.inf, 1.0, -np.inf]])
    for options in (SamplingOptions(temperature=5), SamplingOptions(temperature=5, top_k=4, top_p=0.99, min_p=0.001)):
        assert set(tokens(options, logits, 60)) == {1, 3}


def test_huge_logits_and_tiny_temperatures_stay_finite() -> None:
    logits = mx.array([[1e30, 3e30, -3e30, 2e30]])
    for temperature in (1e-30, 1e-3, 1e3):
        assert set(tokens(SamplingOptions(temperature=temperature, top_p=0.9), logits, 5)) == {1}


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_greedy_with_penalties_follows_the_reference(data: st.DataObject) -> None:
    vocabulary, context = 5, 32
    last_n = data.draw(st.integers(-1, 12))
    repeat = data.draw(st.sampled_from([0.0, 0.5, 1.5, 2.0]))
    presence = data.draw(st.sampled_from([0.0, 0.5, -0.5]))
    frequency = data.draw(st.sampled_from([0.0, 0.25, -0.25]))
    prompt = data.draw(st.lists(st.integers(0, vocabulary - 1), max_size=14))
    options = SamplingOptions(
        repeat_penalty=repeat, presence_penalty=presence, frequency_penalty=frequency, repeat_last_n=last_n
    )
    sampler = Sampler(options, prompt, vocabulary, context)
    scored = st.lists(st.integers(-16, 16), min_size=vocabulary, max_size=vocabulary)
    history = list(prompt)
    for _ in range(8):
        scores = np.array(data.draw(scored), dtype=np.float32) * np.float32(0.25)
        window = context if last_n < 0 else last_n
        expected = reference.penalised(scores, history, repeat or 1.0, presence, frequency, window)
        token = reference.only(sampler(mx.array(scores[None])).token)
        assert token == int(np.argmax(expected))
        history.append(token)


def feedback(logits: mx.array, token: mx.array) -> mx.array:
    """Returns logits that depend on the previous token, like a model's."""
    return mx.roll(logits, 1) + (mx.arange(logits.shape[-1]) == token) * 0.5


def run(options: SamplingOptions, steps: int, after_each: Callable[[Sample], None]) -> list[list[object]]:
    logits = mx.random.normal((1, 64), key=mx.random.key(2)) * 2
    sampler = Sampler(options, [1, 2, 3, 63], 64, 1024)
    samples = []
    for _ in range(steps):
        sample = sampler(logits)
        logits = feedback(logits, sample.token)
        after_each(sample)
        samples.append(sample)
    return [[array.tolist() for array in sample.arrays()] for sample in samples]


def test_the_history_advances_without_being_evaluated() -> None:
    lazily = run(EVERYTHING, 12, lambda sample: None)
    eagerly = run(EVERYTHING, 12, lambda sample: mx.eval(sample.arrays()))
    assert lazily == eagerly


def test_a_call_evaluates_nothing(tmp_path: Path) -> None:
    # Logits that cannot be evaluated: their file is cut off after its header was read.
    path = tmp_path / "logits.safetensors"
    mx.save_safetensors(str(path), {"logits": mx.zeros((1, 4096))})
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    logits = loaded["logits"]
    path.write_bytes(path.read_bytes()[:200])
    sampler = Sampler(EVERYTHING, [1, 2, 3], 4096, 4096)
    samples = [sampler(logits) for _ in range(10)]
    with pytest.raises(RuntimeError):
        mx.eval(samples[-1].token)


def nodes(arrays: list[mx.array], path: Path) -> int:
    mx.export_to_dot(str(path), *arrays)
    return path.read_text().count("label =")


@pytest.mark.parametrize("last_n", [5, 1000, -1])
def test_the_graph_of_a_step_does_not_grow(last_n: int, tmp_path: Path) -> None:
    wishes = {name: getattr(EVERYTHING, name) for name in EVERYTHING.__struct_fields__} | {"repeat_last_n": last_n}
    sampler = Sampler(SamplingOptions(**wishes), [1, 2, 3], 64, 4096)
    logits = mx.random.normal((1, 64), key=mx.random.key(2))
    mx.eval(logits)
    sizes = []
    for _ in range(200):
        arrays = sampler(logits).arrays()
        sizes.append(nodes(arrays, tmp_path / "graph.dot"))
        mx.eval(arrays)
    assert max(sizes[150:]) <= max(sizes[:70])  # a block of random numbers is made every 64 steps


@pytest.mark.parametrize("last_n", [64, -1])
def test_memory_stays_flat_over_a_long_answer(last_n: int) -> None:
    wishes = {name: getattr(EVERYTHING, name) for name in EVERYTHING.__struct_fields__} | {"repeat_last_n": last_n}
    sampler = Sampler(SamplingOptions(**wishes), [1, 2, 3], 256, 8192)
    logits = mx.random.normal((1, 256), key=mx.random.key(2))
    pending: Sample | None = None
    used = []
    for step in range(2048):
        sample = sampler(logits)
        mx.async_eval(sample.arrays())
        if pending is not None:
            pending.token.item()
        pending = sample
        if step % 512 == 511:
            mx.eval(sample.arrays())
            used.append(mx.get_active_memory())
    assert used[-1] - used[0] < 4096


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_tokens_and_values_have_one_type_whatever_the_model_has(dtype: mx.Dtype) -> None:
    for options in (EVERYTHING, SamplingOptions(), SamplingOptions(temperature=1)):
        sample = Sampler(options, [1], 64, 64)(mx.zeros((1, 64), dtype=dtype))
        assert (sample.token.dtype, sample.token.shape) == (mx.uint32, (1,))
    sample = Sampler(EVERYTHING, [1], 64, 64)(mx.zeros((1, 64), dtype=dtype))
    _, logprob, top_ids, top_logprobs = sample.arrays()
    assert (logprob.dtype, logprob.shape) == (mx.float32, (1,))
    assert (top_ids.dtype, top_ids.shape) == (mx.uint32, (1, 4))
    assert (top_logprobs.dtype, top_logprobs.shape) == (mx.float32, (1, 4))
