import random
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.sampling import SamplingOptions
from runner.sampling.penalties import Penalties
from runner.sampling.sampler import Sampler
from tests.unit.sampling import reference


def greedy(logits: Sequence[float], prompt: Sequence[int], **wishes: float) -> int:
    sampler = Sampler(SamplingOptions(repeat_last_n=4, **wishes), prompt, len(logits), 16)  # type: ignore[arg-type]  # mixed keywords
    return reference.only(sampler(mx.array([logits])).token)


def test_an_infinite_penalty_rules_out_seen_tokens_and_no_others() -> None:
    assert greedy([0, 5, 9, 4], [2], presence_penalty=1e39) == 1
    assert greedy([0, 5, 9, 4], [2], frequency_penalty=1e39) == 1
    assert greedy([0, 0, 9, -4], [3], repeat_penalty=1e39) == 2
    assert greedy([0, 5, 9, -4], [1], repeat_penalty=1e-39) == 1


@given(st.data())
def test_scores_and_window_are_those_of_the_reference(data: st.DataObject) -> None:
    """Ids beyond the vocabulary take a place in the window and have no count."""
    vocabulary, context = 6, 240
    last_n = data.draw(st.integers(1, context))
    repeat = data.draw(st.sampled_from([1.0, 0.7, 1.3, 2.0]))
    presence = data.draw(st.sampled_from([0.0, 0.5, -1.5]))
    frequency = data.draw(st.sampled_from([0.0, 0.3, -0.25]))
    numbers = random.Random(data.draw(st.integers()))
    prompt = [numbers.randint(-1, vocabulary) for _ in range(data.draw(st.integers(0, 150)))]  # blocks of a window
    generated = [numbers.randrange(vocabulary) for _ in range(data.draw(st.integers(0, 90)))]
    rows = st.lists(st.floats(-8, 8, width=32), min_size=vocabulary, max_size=vocabulary)
    scores = np.array(data.draw(rows), dtype=np.float32)
    options = SamplingOptions(
        repeat_penalty=repeat, presence_penalty=presence, frequency_penalty=frequency, repeat_last_n=last_n
    )
    penalties = Penalties.of_request(options, prompt, vocabulary, context)
    for token in generated:
        penalties.record(mx.array([token], dtype=mx.uint32))
    window = [token for token in [*prompt, *generated][-last_n:] if 0 <= token < vocabulary]
    assert penalties._counts.tolist() == [[window.count(token) for token in range(vocabulary)]]
    expected = reference.penalised(scores, window, repeat, presence, frequency, len(window))
    assert np.array(penalties.apply(mx.array(scores[None])))[0].tolist() == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize("last_n", [-1, 131071])
def test_a_long_window_costs_no_more_device_state_than_a_short_one(last_n: int) -> None:
    def state_bytes(window: int) -> int:
        options = SamplingOptions(presence_penalty=1, repeat_last_n=window)
        sampler = Sampler(options, list(range(64)), 64, 131072)
        logits = mx.zeros((1, 64))
        mx.eval(logits)
        mx.synchronize()
        before = mx.get_active_memory()
        for _ in range(4):
            mx.eval(sampler(logits).arrays())
        return mx.get_active_memory() - before

    assert state_bytes(last_n) <= state_bytes(8) + 64
