"""Which way is faster: both are tried, the faster one stays, and is asked again less and less often."""

import random
from itertools import pairwise

import pytest

from runner.engine.platform.comparison import Comparison


def run(comparison: Comparison, first_s: float, second_s: float, seconds: float, noise: float = 0.0) -> list[bool]:
    """The way of each step of so many seconds; a step takes what its way takes."""
    numbers, ways = random.Random(1), []
    while seconds > 0:
        ways.append(comparison.first)
        took = (first_s if comparison.first else second_s) * numbers.uniform(1 - noise, 1 + noise)
        comparison.took(1, took)
        seconds -= took
    return ways


def share(ways: list[bool]) -> float:
    return sum(ways) / len(ways)


@pytest.mark.parametrize("step_s", [0.0005, 0.01, 0.2])
def test_the_faster_way_stays(step_s: float) -> None:
    assert share(run(Comparison(), step_s, 1.2 * step_s, 200)) > 0.85
    assert share(run(Comparison(), 1.2 * step_s, step_s, 200)) < 0.15


def test_it_begins_with_the_first_way_and_tries_the_other_soon() -> None:
    ways = run(Comparison(), 0.01, 0.01, 0.5)
    assert ways[:10] == [True] * 10
    assert False in ways


def test_equal_ways_do_not_change_places_for_noise() -> None:
    ways = run(Comparison(), 0.01, 0.01, 100, noise=0.2)
    changes = sum(a != b for a, b in pairwise(ways))
    assert changes < 40


def test_what_has_changed_is_found_out() -> None:
    comparison = Comparison()
    assert share(run(comparison, 0.01, 0.013, 60)) > 0.9
    assert share(run(comparison, 0.013, 0.01, 200)[-5000:]) < 0.3


def test_a_winner_is_asked_less_and_less_often() -> None:
    ways = run(Comparison(), 0.01, 0.02, 600)
    half = len(ways) // 2
    assert 0 < ways[half:].count(False) < ways[:half].count(False)


def test_steps_of_changing_kinds_decide_nothing() -> None:
    comparison = Comparison()
    for step in range(1000):
        comparison.took(step % 3, 0.01)
    assert comparison.first


def test_the_step_after_a_change_does_not_count() -> None:
    """It pays for threads that move and for caches that are cold."""
    comparison = Comparison()
    before = True
    for _ in range(4000):
        changed, before = comparison.first is not before, comparison.first
        comparison.took(1, 5.0 if changed else 0.01 if comparison.first else 0.008)
    assert not comparison.first
