"""Drafting against plain decoding in made-up worlds: time is never much more than that of the better way."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from runner.drafts.speed_check import SpeedCheck


class World(NamedTuple):
    """Drafts of `length` tokens, each right with the probability `right`; a plain step costs 1."""

    right: float
    length: int
    cost: float

    @property
    def best(self) -> float:
        """What a token costs in the better way."""
        return min(1.0, self.cost / sum(self.right**index for index in range(self.length + 1)))


@dataclass
class Played:
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    took: float = 0.0
    best: float = 0.0

    @property
    def ratio(self) -> float:
        return self.took / self.best


def play(
    world: Callable[[int], World],
    tokens: int,
    seed: int = 0,
    noise: float = 0.1,
    offers: float = 1.0,
    spikes: float = 0.0,
) -> Played:
    """Plays until so many tokens; `world` is asked with how many there are. Only some steps have a draft."""
    check, rng, played = SpeedCheck(16), random.Random(seed), Played()
    while played.tokens < tokens:
        now = world(played.tokens)
        offered = rng.random() < offers
        drafts = offered and check.allows()
        got = 1
        while drafts and got <= now.length and rng.random() < now.right:
            got += 1
        cost = now.cost if drafts else 1.0
        spike = 10 if rng.random() < spikes else 1
        check.record(got, 0.01 * cost * spike * rng.lognormvariate(0, noise), drafted=drafts, offered=offered)
        played.tokens += got
        played.steps += 1
        played.drafted += drafts
        played.took += cost
        played.best += got * (now.best if offered else 1.0)
    return played


WORLDS = {
    "12 times as fast": World(1.0, 15, 1.3),
    "4 times as fast": World(1.0, 7, 2.0),
    "half as fast again": World(0.6, 3, 1.4),
    "a tenth faster": World(0.3, 1, 1.15),
    "equal": World(0.4, 1, 1.4),
    "a tenth slower": World(0.4, 2, 1.733),
    "a fifth slower": World(0.3, 3, 1.77),
    "never right": World(0.0, 7, 2.0),
    "never right and dear": World(0.0, 7, 5.0),
}
everywhere = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)


@everywhere
@pytest.mark.parametrize(("noise", "spikes", "seed"), [(0.1, 0.0, 1), (0.3, 0.01, 2)])
def test_being_wrong_costs_little(world: World, noise: float, spikes: float, seed: int) -> None:
    assert play(lambda _: world, 20_000, seed, noise, spikes=spikes).ratio <= 1.025


def test_what_is_far_slower_is_not_checked_again_soon() -> None:
    """Each of these checks takes five steps, the first one of which is not counted."""
    played = play(lambda _: WORLDS["4 times as fast"], 1_000)
    assert played.steps - played.drafted == 5


def test_what_becomes_faster_is_used_before_long() -> None:
    fast, slow = WORLDS["4 times as fast"], WORLDS["never right"]
    played = play(lambda tokens: (fast, slow)[tokens // 20_000 % 2], 80_000, spikes=0.01)
    assert played.ratio <= 1.06
    late = play(lambda tokens: slow if tokens < 50_000 else fast, 60_000)
    never = play(lambda _: slow, 50_000)
    assert 8 * (late.drafted - never.drafted) > 7_000, "of 10,000 tokens"


def test_tokens_count_and_not_steps() -> None:
    """A step with drafts takes twice as long, and gives eight tokens."""
    check = SpeedCheck(16)
    for _ in range(500):
        drafts = check.allows()
        check.record(8 if drafts else 1, 2.0 if drafts else 1.0, drafted=drafts, offered=True)
    assert check.state.name == "on"
    assert check.state.why == "a token takes 0.25 times as long as without drafts"


def test_the_step_behind_a_draft_counts() -> None:
    """Rounds are no slower than steps, but the step behind each is three times as slow."""
    check, behind, drafted = SpeedCheck(16), False, 0
    for number in range(4_000):
        offered = number % 2 == 0
        drafts = offered and check.allows()
        check.record(2 if drafts else 1, 3.0 if behind else 1.0, drafted=drafts, offered=offered)
        behind = drafts
        drafted += drafts
    assert check.state.name == "resting"
    assert drafted < 300


def test_it_can_be_turned_off() -> None:
    check = SpeedCheck(16)
    check.turn_off("going back failed in the trial")
    assert not check.allows()
    for _ in range(1_000):
        check.record(1, 1.0, drafted=False, offered=True)
        assert not check.allows()
    assert check.state == ("off", "going back failed in the trial")
