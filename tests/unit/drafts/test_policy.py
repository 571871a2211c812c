"""How many tokens of a draft are taken, in made-up worlds: drafts are right with some probability, rounds cost time."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.drafts.acceptance import Acceptance, match_class
from runner.drafts.costs import GPU_COSTS, DraftCost, RoundCosts, rows_of
from runner.drafts.draft_policy import MODEL_MATCH, Draft, DraftPolicy, Terms
from runner.engine.policy import StepLimit

MATCHES = (2, 3, 4, 6, 8, 12, 20)
CPU = {1: 1, 2: 1.15, 3: 1.3, 4: 1.4, 5: 1.5, 6: 1.7, 7: 1.85, 8: 2.0}
LARGE_CONTEXT = {1: 1, 2: 1.37, 3: 1.65, 4: 1.94, 5: 1.95, 6: 2.3, 7: 2.7, 8: 3.05}
GPU = {rows: 1 + 0.02 * (rows - 1) for rows in range(1, 17)}


@dataclass(frozen=True)
class World:
    cost: Mapping[int, float]
    make: Callable[..., DraftPolicy]

    @property
    def most(self) -> int:
        return len(self.cost) - 1

    def fixed(self, right: float) -> float:
        """The tokens per cost of the best fixed length."""
        return max(sum(right**i for i in range(rows)) / cost for rows, cost in self.cost.items())


WORLDS = {
    "CPU": World(CPU, DraftPolicy),
    "large context": World(LARGE_CONTEXT, DraftPolicy),
    "GPU": World(GPU, partial(DraftPolicy, first_costs=GPU_COSTS)),
}
everywhere = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)


class Round(NamedTuple):
    length: int
    tokens: int
    cost: float


def rounds(
    world: World,
    policy: DraftPolicy,
    right: Callable[[int], float],
    count: int,
    matches: tuple[int, ...] = MATCHES,
    seed: int = 0,
    noise: float = 0.1,
) -> list[Round]:
    """Plays rounds with one draft each, whose tokens are right with the probability `right(round)`. Some plain steps
    are between them, as in life: at least those of `SpeedCheck`."""
    rng, done = random.Random(seed), list[Round]()
    for number in range(count):
        draft = Draft([1] * world.most, "own", rng.choice(matches))
        [length] = policy.lengths([draft], Terms(1000))
        accepted = 0
        while accepted < length and rng.random() < right(number):
            accepted += 1
        for rows in (1, length + 1)[rng.random() < 0.9 :]:
            spike = 10 if rng.random() < 0.005 else 1
            policy.record_time(rows, 0.01 * world.cost[rows] * spike * rng.lognormvariate(0, noise), 1000)
        policy.record_outcome(draft, length, accepted)
        done.append(Round(length, 1 + accepted, world.cost[length + 1]))
    return done


def rate(done: list[Round]) -> float:
    return sum(each.tokens for each in done) / sum(each.cost for each in done)


@everywhere
def test_drafts_that_are_never_right_cost_next_to_nothing(world: World) -> None:
    done = rounds(world, world.make(), lambda _: 0.0, 2000)
    assert rate(done) >= 0.98
    assert rate(done[500:]) >= 0.985


@everywhere
@pytest.mark.parametrize("right", [0.3, 0.9])
def test_lengths_are_nearly_as_good_as_the_best_fixed_one(world: World, right: float) -> None:
    played = rate(rounds(world, world.make(), lambda _: right, 2000, seed=0))
    assert played >= max(0.98, 0.95 * world.fixed(right))


@everywhere
def test_drafts_that_become_right_are_taken_again_and_wrong_ones_given_up(world: World) -> None:
    done = rounds(world, world.make(), lambda number: float(number // 1000 % 2), 4000)
    for period, best in ((0, 0), (1, world.most), (2, 0), (3, world.most)):
        lengths = [each.length for each in done[period * 1000 + 700 : (period + 1) * 1000]]
        assert abs(sum(lengths) / len(lengths) - best) < 0.25 * world.most


def test_matches_are_told_apart_by_their_length_and_their_source() -> None:
    assert [match_class(match) for match in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    policy = DraftPolicy()
    short, long, other = Draft([1] * 7, "own", 4), Draft([1] * 7, "own", 20), Draft([1] * 7, "earlier", 4)
    [before] = policy.lengths([other], Terms(10))
    for _ in range(20):
        policy.record_outcome(short, 2, 0)
        policy.record_outcome(long, 7, 7)
    assert policy.lengths([short], Terms(10)) == [0]
    assert policy.lengths([long], Terms(10)) == [7]
    assert policy.lengths([other], Terms(10)) == [before]
    assert before > 0


@given(st.integers(1, 40), st.integers(1, 32), st.lists(st.integers(0, 15), max_size=60), st.integers(1, 15))
def test_a_length_is_never_more_than_was_drafted_or_allowed(
    size: int, match: int, accepted: list[int], most: int
) -> None:
    policy = DraftPolicy(most, GPU_COSTS)
    draft = Draft([1] * size, "path", match)
    for each in accepted:
        [length] = policy.lengths([draft], Terms(100))
        assert 0 <= length <= min(size, most)
        policy.record_outcome(draft, length, min(each, length))
        policy.record_time(length + 1, 0.01 * (1 + each), 100)


def test_probes_become_rarer_and_come_back_with_a_success() -> None:
    acceptance = Acceptance(0, 7)
    probes = [number for number in range(1000) if acceptance.probes(0)]
    gaps = [b - a for a, b in pairwise(probes)]
    assert gaps == sorted(gaps)
    assert gaps[0] == 8
    assert gaps[-1] == 64
    for accepted, pause in ((0, 64), (1, 4)):
        assert any(acceptance.probes(0) for _ in range(64))
        acceptance.record(1, accepted)
        assert [acceptance.probes(0) for _ in range(pause)] == [False] * (pause - 1) + [True]


def test_counts_fade_and_a_position_not_tried_is_like_the_one_before() -> None:
    acceptance = Acceptance(0, 4)
    for _ in range(200):
        acceptance.record(2, 1)
    first, second, *others = acceptance.rates()
    assert first > 0.9
    assert second < 0.1
    assert others == [second, second]
    for _ in range(200):
        acceptance.record(1, 1)
    assert next(iter(list(acceptance.rates())[1:])) > 0.9, "long ago"
    for _ in range(200):
        acceptance.record(1, 0)
    assert next(acceptance.rates()) < 0.02


def test_costs_are_learned_and_lie_between_known_ones() -> None:
    costs = RoundCosts([1.0, 1.0, 1.0, 1.0, 1.0])
    costs.record(2, 4.0, 100)
    assert costs.curve(100) == pytest.approx([4, 4, 4, 4, 4])
    assert costs.plain_s(100) == costs.curve(100)[0]
    for _ in range(500):
        costs.record(2, 4.0, 100)
        costs.record(4, 8.0, 100)
    assert costs.curve(100) == pytest.approx([4, 4, 6, 8, 8], rel=0.01)
    costs.record(6, 100.0, 100)  # more rows than there are
    assert costs.curve(100) == pytest.approx([4, 4, 6, 8, 8], rel=0.01)
    costs.record(1, 3.0, 100)
    assert costs.plain_s(100) == costs.plain_s(90) == costs.curve(100)[0]


def test_a_mean_of_rows_is_a_measure_of_the_next_number_as_far_as_it_is_from_the_one_below() -> None:
    for rows, least, most in ((1.1, 1.99, 2.0), (1.5, 1.8, 1.85), (1.9, 1.55, 1.65)):
        costs = RoundCosts([1.0, 2.0, 3.0])
        costs.record(1, 1.0, 100)
        costs.record(rows, 1.0, 100)  # a round that costs no more than a plain step
        assert least <= costs.curve(100)[1] <= most
        assert costs.curve(100)[0] == 1.0
    costs = RoundCosts([1.0, 2.0, 3.0])
    costs.record(2.5, 5.0, 100)
    assert costs.curve(100) == pytest.approx([2, 4, 6])


def test_how_long_rounds_take_is_forgotten_if_there_is_none_for_a_while() -> None:
    """Another program may have slowed the few that there were."""
    costs, tried, pauses = RoundCosts([1.0, 1.5]), 0, list[int]()
    costs.record(1, 1.0, 100)
    for step in range(4000):
        if costs.curve(100)[1] < 1.9:  # worth a try
            costs.record(2, 100.0, 100)
            tried += 1
        elif tried:
            pauses.append(step)
            tried = 0
        costs.record(1, 1.0, 100)
    gaps = [after - before for before, after in pairwise(pauses)]
    assert gaps == sorted(gaps)
    assert 32 <= gaps[0] <= 48 < 1024 <= gaps[-1] <= 1040
    assert costs.curve(100)[0] == pytest.approx(1.0, rel=0.15)


def test_rounds_that_paid_for_a_while_are_tried_again_soon() -> None:
    costs = RoundCosts([1.0, 1.5])

    def plain_steps() -> int:
        costs.record(2, 1000.0, 100)
        costs.record(2, 1000.0, 100)
        known, count = costs.curve(100)[1], 0
        while costs.curve(100)[1] > 0.9 * known:
            costs.record(1, 1.0, 100)
            count += 1
        return count

    costs.record(1, 1.0, 100)
    rare = [plain_steps() for _ in range(4)]
    assert rare[-1] > 4 * rare[0]
    for _ in range(16):
        costs.record(2, 1.5, 100)
    assert plain_steps() < 2 * rare[0]


def test_padding_that_is_skipped_costs_a_tenth_of_a_row() -> None:
    assert rows_of(8, 8) == 8
    assert rows_of(24, 128) == pytest.approx(34.4)
    policy, draft = DraftPolicy(15, skips_padding=True), Draft([1] * 15, "own", 20)
    for _ in range(100):
        policy.record_outcome(draft, 15, 15)
        for rows in range(1, 9):
            policy.record_time(rows, 0.01 * (0.25 + 0.75 * rows), 1000, 8)
    slacks = [1.0] * 8
    assert policy.lengths([draft] * 8, Terms(1000, 8, slacks=slacks)) == [7] * 8
    assert policy.lengths([draft], Terms(1000, 8, slacks=slacks)) == [0], "seven rows of padding for each draft"


def test_rounds_that_do_not_run_follow_those_that_do_when_the_machine_becomes_slower() -> None:
    costs = RoundCosts([1.0] * 4)
    for rows in [1, 2, 4] * 100:
        costs.record(rows, float(rows), 100)
    for _ in range(60):
        costs.record(2, 2 * 1.8, 100)
    assert costs.curve(100)[1] == pytest.approx(3.6, rel=0.01)
    assert costs.curve(100)[0] > 1.4
    assert costs.curve(100)[3] > 5.6
    for rows in [1, 2, 4] * 100:
        costs.record(rows, float(rows), 100)
    assert costs.curve(100) == pytest.approx([1, 2, 3, 4], rel=0.01)


def test_a_round_moves_an_average_by_a_quarter_at_most() -> None:
    costs = RoundCosts([1.0, 2.0])
    costs.record(1, 1.0, 100)
    for rows in (1, 2, 1, 2, 2):
        before = costs.curve(100)[rows - 1]
        costs.record(rows, 1e9, 100)
        assert before < costs.curve(100)[rows - 1] <= 1.25 * before
        costs.record(rows, 0.0, 100)
        assert costs.curve(100)[rows - 1] >= 0.75 * before


def test_an_unknown_context_begins_like_its_neighbour() -> None:
    costs = RoundCosts([1.0, 2.0])
    for _ in range(300):
        costs.record(1, 1.0, 100)
        costs.record(2, 3.0, 100)
    assert costs.curve(1000) == pytest.approx([1, 3], rel=0.01)
    costs.record(1, 2.0, 1000)
    assert costs.curve(1000) == pytest.approx([2, 6], rel=0.01)
    assert costs.curve(100) == pytest.approx([1, 3], rel=0.01)
    assert costs.curve(127) == costs.curve(64)


@everywhere
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("share", [0.05, 1.0])
@pytest.mark.parametrize("right", [0.0, 0.8])
def test_a_models_drafts_are_as_long_as_pays_for_drafting_them(
    world: World, right: float, share: float, at_once: bool
) -> None:
    """It takes so many steps for each token, or for all tokens of a draft together."""
    policy, rng, tokens, seconds = world.make(at_once=at_once), random.Random(1), 0.0, 0.0

    def drafting(length: int) -> float:
        return share * (min(length, 1) if at_once else length)

    for number in range(3000):
        length = policy.model_length([world.most], Terms(1000))
        accepted = 0
        while accepted < length and rng.random() < right:
            accepted += 1
        if length:
            policy.record_drafting(length, 0.01 * drafting(length) * rng.lognormvariate(0, 0.1))
            policy.record_outcome(Draft([1] * length, "model", MODEL_MATCH), length, accepted)
        policy.record_time(length + 1, 0.01 * world.cost[length + 1], 1000)
        if number % 20 == 0:
            policy.record_time(1, 0.01, 1000)
        if number >= 500:
            tokens += 1 + accepted
            seconds += world.cost[length + 1] + drafting(length)
    best = max(sum(right**i for i in range(rows)) / (cost + drafting(rows - 1)) for rows, cost in world.cost.items())
    if not at_once or share < 1:  # a model that takes a step for its drafts is hardly ever asked
        assert tokens / seconds >= 0.94 * best
    assert tokens / seconds >= 0.97


def test_the_first_time_that_a_model_drafts_counts_for_nothing() -> None:
    """It touches memory for the first time, and would keep the model from a second one."""
    cost = DraftCost(3)
    cost.record(1, 5.0)
    assert cost.curve(0.1) == pytest.approx([0.0, 0.02, 0.04, 0.06])
    cost.record(1, 0.01)
    assert cost.curve(0.1) == pytest.approx([0.0, 0.01, 0.015, 0.02])  # each further one is taken for a half
    for _ in range(40):
        cost.record(3, 0.03)
    assert cost.curve(0.1) == pytest.approx([0.0, 0.01, 0.02, 0.03], rel=0.2)


def play_together(
    policy: DraftPolicy, together: int, right: Callable[[int], float], cost: Callable[[float], float], count: int
) -> float:
    """Plays steps in which each answer has a draft, whose tokens are right with the probability `right(answer)`, and a
    forward over so many tokens costs `cost(tokens)`. Returns the tokens per cost, over those without drafts."""
    rng, tokens, spent = random.Random(1), 0, 0.0
    for number in range(count):
        drafts = [Draft([1] * 15, "own", 4 * (1 + answer % 2)) for answer in range(together)]
        lengths = policy.lengths(drafts, Terms(1000, together))
        for answer, (draft, length) in enumerate(zip(drafts, lengths, strict=True)):
            accepted = 0
            while accepted < length and rng.random() < right(answer):
                accepted += 1
            policy.record_outcome(draft, length, accepted)
            tokens += 1 + accepted
        mean = 1 + (sum(lengths) / together if policy.skips_padding else max(lengths))
        spent += cost(together * mean)
        for rows in (1, mean)[number % 8 > 0 :]:
            policy.record_time(rows, 0.01 * cost(together * rows) * rng.lognormvariate(0, 0.1), 1000, together)
    return tokens / spent / (together / cost(together))


def packed(tokens: float) -> float:
    """What a forward of a small model costs on a CPU, as measured."""
    return 0.92 + 0.08 * tokens


def trusting(policy: DraftPolicy, size: int = 7) -> Draft:
    """Returns a draft that was always right."""
    draft = Draft([1] * size, "own", 20)
    for _ in range(100):
        policy.record_outcome(draft, size, size)
    return draft


either_way = pytest.mark.parametrize("skips_padding", [False, True], ids=["with padding", "without padding"])


@either_way
@pytest.mark.parametrize("together", [2, 4, 8, 20])
def test_drafts_of_several_answers_that_are_never_right_cost_next_to_nothing(
    together: int, skips_padding: bool
) -> None:
    policy = DraftPolicy(skips_padding=skips_padding)
    assert play_together(policy, together, lambda _: 0.0, packed, 3000) >= 0.98


@either_way
@pytest.mark.parametrize("together", [2, 4, 8])
def test_several_answers_are_drafted_as_far_as_that_pays_for_all(together: int, skips_padding: bool) -> None:
    policy = DraftPolicy(skips_padding=skips_padding)
    played = play_together(policy, together, lambda _: 0.97, packed, 1000)
    fixed = max(
        sum(0.97**place for place in range(length + 1)) * packed(together) / packed(together * (1 + length))
        for length in range(DraftPolicy().longest(together) + 1)
    )
    assert played >= 0.93 * fixed > 1.2


def test_one_answer_whose_drafts_are_right_is_not_drafted_at_the_cost_of_seven_others() -> None:
    """All rows would be padded to it."""
    policy = DraftPolicy()
    good, bad = trusting(policy), Draft([1] * 7, "own", 4)
    for _ in range(30):
        for rows in (1, 2, 4, 8):
            policy.record_time(rows, 0.01 * packed(8 * rows), 1000, 8)
        policy.record_outcome(bad, 7, 0)
    assert policy.lengths([good], Terms(1000, 8)) == [0]
    assert policy.lengths([good, bad], Terms(1000, 8)) == [0, 0]
    assert policy.lengths([good] * 8, Terms(1000, 8)) == [7] * 8


def test_without_padding_each_answer_is_drafted_as_far_as_its_own_drafts_pay() -> None:
    policy = DraftPolicy(skips_padding=True)
    good, fair, bad = trusting(policy), Draft([1] * 7, "earlier", 20), Draft([1] * 7, "own", 4)
    for _ in range(100):
        for rows in (1, 2, 4, 8):
            policy.record_time(rows, 0.01 * packed(8 * rows), 1000, 8)
        policy.record_outcome(fair, 7, 2)
        policy.record_outcome(bad, 7, 0)
    slacks = [1.0] * 8
    assert policy.lengths([good, fair, bad], Terms(1000, 8, slacks=slacks)) == [7, 2, 0]
    assert policy.lengths([good] * 7 + [bad], Terms(1000, 8, slacks=slacks)) == [7] * 7 + [0]


def test_of_answers_without_padding_each_round_counts_by_its_rows() -> None:
    policy, draft = DraftPolicy(15, skips_padding=True), Draft([1] * 15, "own", 20)
    for _ in range(100):
        policy.record_outcome(draft, 15, 15)
        policy.record_time(1, 0.01, 1000, 8)
        policy.record_time(1 + 15 / 8, 0.02, 1000, 8)
    assert policy.lengths([draft], Terms(1000, 8, slacks=[0.0] + [0.02] * 7)) == [15]
    assert max(policy.lengths([draft], Terms(1000, 8, slacks=[0.0] + [0.002] * 7))) < 5
    assert sum(policy.lengths([draft] * 8, Terms(1000, 8))) <= 64 - 8


@pytest.mark.parametrize(
    ("limit", "together", "length"),
    [
        (StepLimit(0.025, 16), 4, 7),
        (StepLimit(0.001, 16), 4, 4),
        (StepLimit(0.001, 16), 8, 2),
        (StepLimit(0.001, 16), 1, 15),
        (StepLimit(0.025), 4, 7),
        (StepLimit(0.025), 1, 7),
        (StepLimit(0.001), 1, 0),
    ],
)
def test_a_round_takes_no_longer_than_its_limit_or_has_as_few_drafts(
    limit: StepLimit, together: int, length: int
) -> None:
    policy = DraftPolicy(15)
    draft = trusting(policy, 15)
    assert policy.lengths([draft] * together, Terms(1000, together, limit)) == [policy.longest(together)] * together, (
        "nothing is known"
    )
    for rows in [*range(1, 17)] * 20:
        policy.record_time(rows, 0.01 * (0.8 + 0.2 * rows), 1000, together)
    assert policy.lengths([draft] * together, Terms(1000, together, limit)) == [length] * together
    assert policy.lengths([draft] * together, Terms(1000, together)) == [policy.longest(together)] * together


@pytest.mark.parametrize(("row_cost", "length"), [(0.6, 0), (0.02, 2), (0.003, 15)])
def test_an_answer_without_drafts_keeps_its_pace_whatever_the_others_gain(row_cost: float, length: int) -> None:
    policy = DraftPolicy(15)
    draft = trusting(policy, 15)
    for rows in [*range(1, 17)] * 200:
        policy.record_time(rows, 0.01 * (1 - row_cost + row_cost * rows), 1000, 4)
    assert policy.lengths([draft] * 4, Terms(1000, 4)) == [15] * 4
    assert policy.lengths([draft] * 3, Terms(1000, 4)) == [length] * 3


def test_an_answer_that_is_ahead_lets_others_draft() -> None:
    policy = DraftPolicy(15)
    draft, step_s, round_s = trusting(policy, 15), 0.01, 0.05
    assert policy.slacks_after(Terms(1000, 4, slacks=[0.3]), [1], 16) == [0.3], "nothing is known"
    for rows in [*range(1, 17)] * 20:
        policy.record_time(rows, step_s + (round_s - step_s) * (rows - 1) / 15, 1000, 4)
    lost = 0.95 * round_s - step_s
    for slack, length in ((0.0, 0), (lost / 2, 7), (lost * 1.01, 15)):
        found = policy.lengths([draft] * 3, Terms(1000, 4, slacks=[0.0, 0.0, 0.0, slack]))
        assert found == pytest.approx([length] * 3, abs=1)
        assert policy.lengths([draft] * 3, Terms(1000, 4, slacks=[slack, slack, slack, 0.0])) == [0] * 3
    for slack, brought, rows, plain, left in (
        (0.3, 1, 16, 0, 0.3 - lost),
        (0.3, 16, 16, 0, 0.3 + 16 * step_s - 0.95 * round_s),
        (0.3, 1, 1, 0, 0.3 + 0.05 * step_s),
        (0.3, 1, 1, 7, 0.3 + 8 * 0.05 * step_s),
    ):
        after = policy.slacks_after(Terms(1000, 4, slacks=[slack]), [brought], rows, plain)
        assert after == pytest.approx([left], rel=0.01)
    assert policy.slacks_after(Terms(1000, 4, slacks=[0.999]), [16], 16) == [1.0]
    assert policy.slacks_after(Terms(1000, 4, slacks=[0.3]), [17], 17) == [0.3], "nothing is learned from forced tokens"


def test_a_forward_has_no_more_tokens_than_are_allowed() -> None:
    policy = DraftPolicy(first_costs=GPU_COSTS)
    assert [policy.longest(together) for together in (1, 2, 4, 8, 16, 32, 64)] == [15, 15, 15, 7, 3, 1, 0]
    policy = DraftPolicy(skips_padding=True)
    assert [policy.longest(together) for together in (1, 8, 32, 64)] == [15, 15, 15, 0]


def test_what_a_probe_costs_several_answers_makes_it_as_much_rarer() -> None:
    def probes(together: int) -> int:
        policy, draft, found = DraftPolicy(), Draft([1] * 7, "own", 8), 0
        for _ in range(6000):
            length = max(policy.lengths([draft] * together, Terms(1000, together)))
            policy.record_outcome(draft, length, 0)
            found += length > 0
        return found

    assert probes(8) < probes(1) / 3


def test_a_model_drafts_more_where_the_rows_are_paid_for() -> None:
    """Beside a draft of known text a token of the model costs no row; and never more tokens than that one has."""
    policy = DraftPolicy(7, [1.0 + 0.5 * row for row in range(64)])
    for _ in range(40):
        policy.record_outcome(Draft([1] * 7, "model", MODEL_MATCH), 7, 1)
        policy.record_outcome(Draft([1] * 7, "own", 16), 7, 7)
        for length in range(1, 8):
            policy.record_time(length, 0.01 * (1 + 0.5 * (2 * length - 2)), 1000, 2)
            policy.record_drafting(length, 0.0005 * length, 2)
    by_itself = {policy.model_length([7, 7], Terms(1000, 2)) for _ in range(4)}
    beside = {policy.model_length([7], Terms(1000, 2), [Draft([1] * 5, "own", 16)]) for _ in range(4)}
    assert max(by_itself) == 0
    assert 1 <= min(beside) <= max(beside) <= 5
