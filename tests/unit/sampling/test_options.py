import pytest

from runner.sampling import SamplingOptions


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        *(("top_k", each, 0) for each in (-1, 0, 100, 101)),
        *(("top_p", each, 1) for each in (-0.5, 0.0, 1.0, 1.5)),
        *(("min_p", each, 0) for each in (-0.5, 0.0, 1.01)),
        *(("temperature", each, 0) for each in (-1.0, 1e-40)),
        ("temperature", 1e-30, 1e-30),
        *(("top_logprobs", each, 0) for each in (5, -1)),
        ("seed", 0, 0),
    ],
)
def test_a_value_outside_its_range_turns_an_option_off(name: str, given: float, wanted: float) -> None:
    assert getattr(SamplingOptions(**{name: given}).normalised(100, 50), name) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, 0),
        ({"repeat_penalty": 1.0}, 0),
        ({"repeat_penalty": -2.0}, 0),
        ({"repeat_penalty": 0.5}, 8),
        ({"presence_penalty": -0.1}, 8),
        ({"frequency_penalty": 0.1}, 8),
        ({"repeat_last_n": -1, "presence_penalty": 1}, 50),  # the context, which no window exceeds
        ({"repeat_last_n": 999, "presence_penalty": 1}, 50),
    ],
)
def test_penalties_are_active_only_with_a_window_and_a_penalty(given: dict[str, float], wanted: int) -> None:
    options = SamplingOptions(**{"repeat_last_n": 8, **given})  # type: ignore[arg-type]
    assert options.normalised(100, 50).repeat_last_n == wanted


def test_no_more_alternatives_are_wanted_than_there_are_tokens() -> None:
    for wanted, found in ((5, 5), (500, 100), (-1, 0)):
        assert SamplingOptions(logprobs=True, top_logprobs=wanted).normalised(100, 50).top_logprobs == found


def test_a_missing_or_negative_seed_is_fresh_each_time() -> None:
    fresh = {SamplingOptions(seed=seed).normalised(100, 50).seed for seed in (None, None, -1, -1)}
    assert len(fresh) == 4
    assert all(seed is not None and 0 <= seed < 1 << 64 for seed in fresh)


def test_penalties_are_bounded() -> None:
    options = SamplingOptions(repeat_penalty=1e39, presence_penalty=1e39, frequency_penalty=-1e39, repeat_last_n=8)
    wide = options.normalised(100, 50)
    assert (wide.repeat_penalty, wide.presence_penalty, wide.frequency_penalty) == (2.0**100, 2.0**100, -(2.0**100))
    assert SamplingOptions(repeat_penalty=1e-39).normalised(100, 50).repeat_penalty == 2.0**-100
