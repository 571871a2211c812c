"""The gain of drafts where several answer: recorded answers are played through the real drafters and their policy, and
each forward takes as long as it did on one machine.

`answers.json` has greedy answers of SmolLM2-135M-Instruct in 4 bits to prompts of `scripts/bench drafts`: by case, for
several rounds of eight users, the tokens of each prompt and the first 128 of its answer.
"""

import json
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from random import Random
from statistics import mean
from typing import NamedTuple, cast

import pytest

from runner.cache.session import Session
from runner.drafts.costs import rows_of
from runner.drafts.draft_policy import DraftPolicy
from runner.drafts.drafting import AnswerDrafter, DraftedAnswer, DraftedStep, Drafting, StepTime
from runner.engine.lifecycle import Lifecycle
from runner.engine.policy import StepLimit
from runner.sampling.sampler import Sampler
from tests.lib.seen_session import LookClock, SeenSession

USERS = json.loads((Path(__file__).parent / "answers.json").read_text())
FORWARD_MS = {1: 12.0, 2: 13.5, 4: 16.5, 8: 26.5, 16: 42.0, 32: 71.0, 48: 97.0, 64: 122.0}
"""By its rows, on two cores of a Zen 4 with AVX-512."""
LOOK_S, EACH_LOOK_S, FOUND_S = 150e-6, 25e-6, 200e-6
"""Looking for known text costs so long, so long for each answer, and so long if there is any."""
LEAVE_S = 0.007
"""The others wait so long for an answer that leaves."""
UNEVEN = 1.03
"""A step takes so many times as long once answers have gained different numbers of tokens."""
LIMIT = StepLimit(0.1, 16)
MOST = 15


def forward_s(rows: float) -> float:
    for (low, low_ms), (high, high_ms) in pairwise(FORWARD_MS.items()):
        if rows <= high:
            return (low_ms + (high_ms - low_ms) * (rows - low) / (high - low)) / 1000
    raise ValueError(rows)


class Answer:
    """One that is being played."""

    def __init__(self, drafting: Drafting, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        self.session = cast("Session", SeenSession(prompt))
        self.drafter: AnswerDrafter = drafting.drafter(prompt)
        self.drafter.index(1 << 20)
        self.left = [*tokens]
        self.end_s = 0.0

    def take(self, drafts: Sequence[int]) -> int:
        """Takes its next token, and those after it that were drafted right. Returns how many."""
        right = 0
        while right < min(len(drafts), len(self.left) - 1) and drafts[right] == self.left[right]:
            right += 1
        if drafts:
            self.drafter.record_outcome(len(drafts), right, Lifecycle(0, 0, 0))
        self.session.recorded.extend(self.left[: right + 1])
        del self.left[: right + 1]
        return right + 1


class Played(NamedTuple):
    """Figures over those without drafts."""

    all: float
    """Tokens a second of all answers until the last one ends: as they are of one length, those of the slowest one."""
    together: float
    """Tokens a second of all until the first one ends."""


def play(
    drafting: Drafting, clock: LookClock, users: Sequence[tuple[Sequence[int], Sequence[int]]], varies: Random | None
) -> Played:
    """Plays answers that begin together, as `engine/batch.py` steps; the speed of the machine may vary, for drafters to
    see: what is returned is of an even one."""
    answers = [Answer(drafting, prompt, tokens) for prompt, tokens in users]
    live, tokens, first_rate, spent_s = [*answers], 0, 0.0, 0.0
    plain_s = forward_s(len(users)) * max(len(tokens) for _, tokens in users)
    drawn, uneven, slowness, slow_until_s = False, 1.0, 1.0, 0.0
    measured_at = -1
    for number in count():
        if not live:
            break
        many = len(live)
        drafters = [each.drafter for each in live]
        looking = sum(number % each.drafter.every == 0 for each in live)
        clock.look_s = LOOK_S + EACH_LOOK_S * looking if looking else 0.0
        found = looking > 0 and drafting.look([(each.drafter, each.session) for each in live], number)
        asked = [
            DraftedAnswer(each.drafter, each.session, most, cast("Sampler", None), row, len(each.session.recorded))
            for row, each in enumerate(live)
            if found and (most := min(MOST, len(each.left) - 1)) > int(drawn)
        ]
        step_s = forward_s(many) * uneven
        drafts: list[Sequence[int]] = [()] * many
        if drawn:
            waits = bool(asked) and drafting.expects(DraftedStep(asked, many, LIMIT))
            length, seconds, drawn = (0, 0.006, False) if waits else (1, step_s, True)
        else:
            for answer, its in zip(
                asked, drafting.propose(DraftedStep(asked, many, LIMIT)) if asked else (), strict=True
            ):
                drafts[answer.row] = its[: answer.most]
            length = 1 + max(map(len, drafts))
            if length > 1:
                rows = rows_of(many + sum(map(len, drafts)), many * length)
                seconds, uneven = forward_s(rows), UNEVEN
            else:
                length, seconds, drawn = -1, 2 * step_s, True
        got = [each.take(its) for each, its in zip(live, drafts, strict=True)]
        seconds += clock.look_s + (FOUND_S if found else 0.0)
        spent_s += seconds
        tokens += sum(got)
        if varies is not None:
            if spent_s > slow_until_s:
                slow_until_s, slowness = spent_s + varies.expovariate(0.7), varies.choice((1.0, 1.0, 1.0, 1.3, 1.8))
            seconds *= slowness * varies.lognormvariate(0, 0.06)
        asked_rows = 1 + sum(map(len, drafts)) / many if length > 1 else length
        step = StepTime(seconds, sum(got), many, length, asked_rows)
        if drafting.measuring or number % 8 == 0:
            drafting.record_time(drafters, step._replace(steps=number - measured_at))
            measured_at = number
        for each in [each for each in live if not each.left]:
            first_rate = first_rate or tokens / spent_s
            each.end_s = spent_s
            each.drafter.close()
            live.remove(each)
            spent_s += LEAVE_S
    plain_rate, ends = tokens / plain_s, [each.end_s for each in answers]
    return Played(tokens / max(ends) / plain_rate, first_rate / plain_rate)


def play_all(cases: Sequence[tuple[str, int]], random: Random | None = None) -> Played:
    """Plays so many users of each case together, round after round: the mean of all rounds but the first."""
    clock = LookClock()
    drafting = Drafting(DraftPolicy(skips_padding=True), clock=clock)
    played = list[Played]()
    for number in range(min(len(USERS[name]) for name, _ in cases)):
        for group in range(min(8 // users for _, users in cases)):
            users = [user for name, count in cases for user in USERS[name][number][group * count :][:count]]
            played.append(play(drafting, clock, users, random))
    later = played[1:]
    return Played(*(sum(values) / len(later) for values in zip(*later, strict=True)))


CASES = (
    ([("repeat", 2)], 2.3, 2.35),
    ([("repeat", 4)], 1.65, 1.7),
    ([("repeat", 8)], 1.4, 1.45),
    ([("agents", 4)], 1.7, 1.75),
    ([("fresh", 4)], 0.98, 1.1),
    ([("fresh", 8)], 0.98, 1.1),
    ([("repeat", 2), ("fresh", 2)], 1.03, 1.3),
    ([("repeat", 4), ("fresh", 4)], 1.0, 1.15),
)
"""Users of each case, and what drafts should bring them."""
NAMES = [" and ".join(f"{n} {name}" for name, n in case) for case, *_ in CASES]


@pytest.mark.parametrize(("cases", "all_of_it", "together"), CASES, ids=NAMES)
def test_drafts_make_several_answers_faster_and_none_slower(
    cases: Sequence[tuple[str, int]], all_of_it: float, together: float
) -> None:
    played = play_all(cases)
    assert played.all >= all_of_it
    assert played.together >= together


@pytest.mark.parametrize(("cases", "all_of_it", "together"), CASES, ids=NAMES)
def test_drafts_make_answers_faster_on_a_machine_whose_speed_varies(
    cases: Sequence[tuple[str, int]], all_of_it: float, together: float
) -> None:
    """The policy learns of a change late: stories lose up to a hundredth more than on an even machine."""
    played = [play_all(cases, Random(seed)) for seed in (1, 2)]
    assert mean(each.all for each in played) >= min(1.5 * all_of_it - 0.5, 1 + (all_of_it - 1) * 0.45)
    assert mean(each.together for each in played) >= 1 + (together - 1) * 0.45
