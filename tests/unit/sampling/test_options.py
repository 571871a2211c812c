from runner.sampling import SamplingOptions


def test_values_outside_a_filters_range_turn_it_off() -> None:
    for top_k in (-1, 0, 100, 101):
        assert SamplingOptions(top_k=top_k).normalised(100, 50).top_k == 0
    for top_p in (-0.5, 0.0, 1.0, 1.5):
        assert SamplingOptions(top_p=top_p).normalised(100, 50).top_p == 1
    for min_p in (-0.5, 0.0, 1.01):
        assert SamplingOptions(min_p=min_p).normalised(100, 50).min_p == 0


def test_a_negative_or_vanishing_temperature_is_greedy() -> None:
    assert SamplingOptions(temperature=-1.0).normalised(100, 50).temperature == 0
    assert SamplingOptions(temperature=1e-40).normalised(100, 50).temperature == 0
    assert SamplingOptions(temperature=1e-30).normalised(100, 50).temperature == 1e-30


def test_penalties_are_active_only_with_a_window_and_a_penalty() -> None:
    assert SamplingOptions(repeat_last_n=8).normalised(100, 50).repeat_last_n == 0
    assert SamplingOptions(repeat_last_n=8, repeat_penalty=1.0).normalised(100, 50).repeat_last_n == 0
    assert SamplingOptions(repeat_last_n=8, repeat_penalty=-2.0).normalised(100, 50).repeat_last_n == 0
    assert SamplingOptions(repeat_last_n=8, repeat_penalty=0.5).normalised(100, 50).repeat_last_n == 8
    assert SamplingOptions(repeat_last_n=8, presence_penalty=-0.1).normalised(100, 50).repeat_last_n == 8
    assert SamplingOptions(repeat_last_n=8, frequency_penalty=0.1).normalised(100, 50).repeat_last_n == 8


def test_a_negative_window_is_the_context_and_no_window_is_longer() -> None:
    assert SamplingOptions(repeat_last_n=-1, presence_penalty=1).normalised(100, 50).repeat_last_n == 50
    assert SamplingOptions(repeat_last_n=999, presence_penalty=1).normalised(100, 50).repeat_last_n == 50


def test_alternatives_without_logprobs_are_not_wanted() -> None:
    assert SamplingOptions(top_logprobs=5).normalised(100, 50).top_logprobs == 0
    assert SamplingOptions(logprobs=True, top_logprobs=5).normalised(100, 50).top_logprobs == 5
    assert SamplingOptions(logprobs=True, top_logprobs=500).normalised(100, 50).top_logprobs == 100
    assert SamplingOptions(logprobs=True, top_logprobs=-1).normalised(100, 50).top_logprobs == 0


def test_seed_0_is_a_seed_and_a_missing_or_negative_one_is_fresh_each_time() -> None:
    assert SamplingOptions(seed=0).normalised(100, 50).seed == 0
    fresh = {SamplingOptions(seed=seed).normalised(100, 50).seed for seed in (None, None, -1, -1)}
    assert len(fresh) == 4
    assert all(seed is not None and 0 <= seed < 1 << 64 for seed in fresh)


def test_penalties_without_bounds_are_bounded() -> None:
    options = SamplingOptions(repeat_penalty=1e39, presence_penalty=1e39, frequency_penalty=-1e39, repeat_last_n=8)
    wide = options.normalised(100, 50)
    assert (wide.repeat_penalty, wide.presence_penalty, wide.frequency_penalty) == (2.0**100, 2.0**100, -(2.0**100))
    assert SamplingOptions(repeat_penalty=1e-39).normalised(100, 50).repeat_penalty == 2.0**-100
