import mlx.core as mx
import numpy as np
import pytest

from runner.sampling import SamplingOptions
from runner.sampling.sample import FLOOR, Choice, log_probabilities, most_probable
from runner.sampling.sampler import Sampler


def sample(options: SamplingOptions, logits: list[float], prompt: tuple[int, ...] = ()) -> Choice:
    (choice,) = Sampler(options, prompt, len(logits), 16)(mx.array([logits])).read()
    return choice


def test_logprobs_off_means_none_whatever_the_number_of_alternatives() -> None:
    taken = Sampler(SamplingOptions(top_logprobs=5), [], 8, 16)(mx.zeros((1, 8)))
    assert len(taken.arrays()) == 1
    assert taken.read() == [Choice(0, None, ())]


def test_the_greedy_token_is_first_among_many_equals() -> None:
    token, _, top, *_ = sample(SamplingOptions(logprobs=True, top_logprobs=1), [0.0] * 50 + [1.0] * 50)
    assert token == top[0][0] == 50


def test_values_are_those_of_the_raw_logits() -> None:
    logits = [1.0, 4.0, 2.0, 3.0]
    expected = np.array(logits) - np.log(np.exp(logits).sum())
    changed = SamplingOptions(
        temperature=0.3,
        top_k=2,
        top_p=0.5,
        min_p=0.5,
        repeat_penalty=50,
        presence_penalty=20,
        repeat_last_n=4,
        seed=1,
        logprobs=True,
        top_logprobs=4,
    )
    token, logprob, top, *_ = sample(changed, logits, prompt=(1, 3))
    ids, logprobs = [*zip(*top, strict=True)]
    assert token in (0, 2)
    assert logprob == pytest.approx(expected[token])
    assert ids == (1, 3, 2, 0)
    assert logprobs == pytest.approx(sorted(expected, reverse=True))


def test_nothing_is_below_the_floor() -> None:
    values = log_probabilities(mx.array([[0.0, -20000.0, -np.inf, -9000.0]]))
    assert values.tolist() == [[0, FLOOR, FLOOR, -9000]]
    assert [array.tolist() for array in most_probable(values, 4)] == [[[0, 3, 1, 2]], [[0, -9000, FLOOR, FLOOR]]]


def test_many_alternatives_of_a_large_vocabulary() -> None:
    logits = np.random.default_rng(1).normal(size=(2, 30000)).astype(np.float32)
    ids, logprobs = most_probable(log_probabilities(mx.array(logits)), 20)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :20]
    assert np.array(ids).tolist() == order.tolist()
    assert (np.diff(np.array(logprobs), axis=-1) <= 0).all()
