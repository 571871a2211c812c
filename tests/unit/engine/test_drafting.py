"""What answers are drafted with: which source comes first, what is held back, and what is learned."""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import pytest

from runner.cache.session import Session
from runner.drafts.costs import GPU_COSTS
from runner.drafts.draft_policy import DraftPolicy
from runner.drafts.drafting import AnswerDrafter, DraftedAnswer, DraftedStep, Drafting, StepTime
from runner.engine.generation import Forward
from runner.engine.lifecycle import Lifecycle
from runner.sampling.sampler import Sampler
from tests.lib.seen_session import LookClock, SeenSession

QUOTED = [*range(100, 140)]
MOST = 50
SAMPLER = cast("Sampler", None)
"""Only models draw their drafts."""


def begun(drafting: Drafting, prompt: Sequence[int], path: Sequence[int] = ()) -> tuple[AnswerDrafter, Session]:
    drafter = drafting.drafter(prompt)
    drafter.index(1000)
    return drafter, cast("Session", SeenSession(prompt, path))


def asking(drafter: AnswerDrafter, session: Session, most: int = MOST, row: int = 0) -> DraftedAnswer:
    return DraftedAnswer(drafter, session, most, SAMPLER, row, len(session.recorded) - 1)


def look(answers: Sequence[DraftedAnswer]) -> Drafting:
    """Lets these answers look for drafts. Returns what they share."""
    shared = answers[0].drafter.shared
    shared.look([(each.drafter, each.session) for each in answers], 0)
    return shared


def expects(drafter: AnswerDrafter, session: Session) -> bool:
    answers = [asking(drafter, session)]
    return look(answers).expects(DraftedStep(answers, 1))


def proposed(drafter: AnswerDrafter, session: Session, most: int = MOST) -> list[int]:
    answers = [asking(drafter, session, most)]
    (tokens,) = look(answers).propose(DraftedStep(answers, 1))
    return [*tokens]


def took(drafter: AnswerDrafter, tokens: int, rows: int, seconds: float) -> None:
    drafter.shared.record_time([drafter], StepTime(seconds, tokens, 1, rows, rows))


def ready() -> Drafting:
    return Drafting(DraftPolicy())


def test_a_quotation_is_drafted_from_the_requests_own_text() -> None:
    drafter, session = begun(ready(), [*QUOTED, 7, *QUOTED[:20]])
    assert proposed(drafter, session) == QUOTED[20:30]
    assert len(proposed(drafter, session, 3)) <= 3


def test_a_path_of_the_cache_comes_first() -> None:
    drafter, session = begun(ready(), [*QUOTED, 7, *QUOTED[:20]], path=[1, 2, 3])
    assert proposed(drafter, session) == [1, 2, 3]


def test_an_earlier_answer_is_drafted_again_but_not_under_another_salt() -> None:
    drafting = ready()
    drafter, session = begun(drafting, [*range(40)])
    session.recorded.extend(QUOTED)
    proposed(drafter, session)
    drafter.close()
    again, session = begun(drafting, [*range(40)])
    assert proposed(again, session)[:3] == QUOTED[:3]
    drafting.salt = "another"
    other, session = begun(drafting, [*range(40)])
    assert not proposed(other, session)


def test_nothing_is_drafted_for_a_model_that_must_not_be_and_the_counts_say_why() -> None:
    drafting = Drafting(DraftPolicy(), "its masks look ahead")
    drafter, session = begun(drafting, [*QUOTED, 7, *QUOTED[:20]])
    assert not expects(drafter, session)
    assert not proposed(drafter, session)
    assert (drafting.counts().state, drafting.counts().why) == ("off", "its masks look ahead")


def test_rounds_are_counted_by_source() -> None:
    drafting = ready()
    drafter, session = begun(drafting, [*QUOTED, 7, *QUOTED[:20]])
    drafts = proposed(drafter, session)
    drafter.record_outcome(len(drafts), 2, Lifecycle(0, 0, 0))
    took(drafter, 3, 1 + len(drafts), 0.01)
    counts = drafting.counts()
    assert counts.rounds == 1
    assert (counts.drafted["own"], counts.accepted["own"]) == (len(drafts), 2)
    assert counts.state == "on"


def looks(drafter: AnswerDrafter, session: Session, steps: int) -> list[int]:
    """Returns the steps, of 10 ms, in which an answer looks in vain."""
    looked = list[int]()
    for step in range(steps):
        session.recorded.append(1000 + step)
        if step % drafter.every == 0:
            assert not drafter.shared.look([(drafter, session)], step)
            looked.append(step)
            took(drafter, 1, 1, 0.01)
    return looked


@pytest.mark.parametrize(("look_s", "rarest"), [(0.00004, 1), (0.00006, 2), (0.00015, 4), (0.0003, 8), (0.01, 16)])
def test_looks_in_vain_become_rare_as_far_as_they_take_half_a_hundredth_of_the_time(look_s: float, rarest: int) -> None:
    drafting = Drafting(DraftPolicy(), clock=LookClock(look_s))
    looked = looks(*begun(drafting, [*range(40)]), 600)
    gaps = [later - earlier for earlier, later in pairwise(looked)]
    assert gaps == sorted(gaps)
    assert [gaps.count(gap) for gap in (1, 2, 4, 8) if gap < rarest] == [8, 8, 8, 7][: rarest.bit_length() - 1]
    assert max(gaps) == rarest


def test_an_answer_looks_at_once_again_after_drafts_that_were_right() -> None:
    drafting = Drafting(DraftPolicy(), clock=LookClock(0.01))
    drafter, session = begun(drafting, [*range(40)])
    looks(drafter, session, 600)
    assert drafter.every == 16
    session.recorded.extend([*range(8)])
    assert expects(drafter, session)
    assert drafter.every == 1, "a round follows"
    for right, every in ((0, 16), (1, 1)):
        session.recorded.append(8)
        drafts = proposed(drafter, session)
        drafter.record_outcome(len(drafts), right, Lifecycle(0, 0, 0))
        took(drafter, 1 + right, 1 + len(drafts), 0.01)
        session.recorded.append(7000)
        drafter.shared.look([(drafter, session)], 16)
        assert drafter.every == every
        session.recorded.extend([*range(8)])


def test_what_an_answer_found_is_not_drafted_in_a_later_step_in_which_it_does_not_look() -> None:
    drafting = Drafting(DraftPolicy(), clock=LookClock(0.01))
    rare, session = begun(drafting, [*range(40)])
    looks(rare, session, 600)
    session.recorded.extend([*range(8)])
    assert rare.look(session, 16)
    session.recorded.append(7000)
    assert not drafting.look([(rare, session)], 17)
    assert not any(drafting.propose(DraftedStep([asking(rare, session)], 1)))


class Model:
    """Drafts the same tokens every time."""

    name = "mine"
    at_once = False
    most_together = 4
    nbytes = 7

    def __init__(self, parts: int = 0) -> None:
        self.parts, self.asked = parts, list[int]()

    def most_bytes(self, answers: int) -> int:
        return answers

    def watch(self, forward: Forward) -> Forward:
        return forward

    def read_texts(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:
        self.parts -= 1
        return self.parts >= 0

    def propose(self, answers: Sequence[DraftedAnswer], layers: Sequence[object], most: int) -> Sequence[Sequence[int]]:
        self.asked.append(most)
        return [[8, 9, 10, 11, 12, 13, 14][:most] for _ in answers]

    def free(self) -> None: ...


def test_a_model_drafts_where_nothing_is_known() -> None:
    model = Model()
    drafting = Drafting(DraftPolicy(), model=model)
    drafter, session = begun(drafting, [*range(40)])
    drafts = proposed(drafter, session)
    assert drafts == [8, 9, 10, 11, 12, 13, 14][: len(drafts)]
    assert drafts
    life = Lifecycle(0, 0, 0)
    drafter.record_outcome(len(drafts), 1, life)
    took(drafter, 2, 1 + len(drafts), 0.01)
    counts = drafting.counts()
    assert (counts.drafted["model"], counts.accepted["model"]) == (len(drafts), 1)
    assert (life.model_drafted, life.model_accepted) == (len(drafts), 1)
    assert counts.model is not None
    assert (counts.model.name, counts.model.bytes, counts.model.state) == ("mine", 7, "on")
    drafter, session = begun(drafting, [*QUOTED, 7, *QUOTED[:20]])
    assert proposed(drafter, session) == QUOTED[20:30]
    assert len(model.asked) == 1


def test_a_model_waits_for_the_token_on_its_way_unless_it_has_to_read() -> None:
    drafter, session = begun(Drafting(DraftPolicy(), model=Model(2)), [*range(40)])
    for waits in (False, False, True):
        assert expects(drafter, session) is waits
        took(drafter, 1, 0, 0.01)
    assert proposed(drafter, session)


def test_a_model_rests_by_the_clock_and_what_is_known_is_drafted_all_the_same() -> None:
    """Its drafts are right, and slower than none."""
    drafting = Drafting(DraftPolicy(), model=Model())
    drafting.policy.model_length = lambda *_: 2  # type: ignore[method-assign]  # thinks that it pays
    drafter, session = begun(drafting, [*range(40)])
    for _ in range(400):
        drafts = proposed(drafter, session)
        drafter.record_outcome(len(drafts), 1, Lifecycle(0, 0, 0))
        drafting.model_s = 0.04 if drafts else 0.0
        took(drafter, 2 if drafts else 1, 1 + len(drafts), 0.05 if drafts else 0.01)
    assert (drafting.speed(1, by_model=True).state.name, drafting.speed(1).state.name) == ("resting", "on")
    drafter, session = begun(drafting, [*QUOTED, 7, *QUOTED[:20]])
    assert proposed(drafter, session) == QUOTED[20:30]


def test_known_text_is_looked_for_in_each_step_while_its_drafts_rest_and_a_model_drafts() -> None:
    drafting = Drafting(DraftPolicy(), model=Model())
    drafting.speed(1).turn_off("it is slower")
    drafter, session = begun(drafting, [*QUOTED, 7, *QUOTED[:20]])
    for _ in range(20):
        drafts = proposed(drafter, session)
        assert drafts == [8, 9, 10, 11, 12, 13, 14][: len(drafts)]
        took(drafter, 1, 1 + len(drafts), 0.01)
        assert drafter.every == 1


def test_a_model_drafts_for_all_answers_of_a_forward_but_not_for_more_than_it_can() -> None:
    model = Model()
    drafting = Drafting(DraftPolicy(first_costs=GPU_COSTS), model=model)
    begun_answers = [begun(drafting, [*range(place, 40 + place)]) for place in range(5)]
    answers = [asking(drafter, session, row=row) for row, (drafter, session) in enumerate(begun_answers)]
    assert look(answers[:3]).expects(DraftedStep(answers[:3], 3))
    found = look(answers[:3]).propose(DraftedStep(answers[:3], 3))
    assert [*map(list, found)] == [[8, 9, 10, 11, 12, 13, 14][: model.asked[0]]] * 3
    assert model.asked[0] > 0
    drafting.record_time(
        [each.drafter for each in answers[:3]], StepTime(0.01, 3, 3, 1 + len(found[0]), 1 + len(found[0]))
    )
    assert not look(answers).expects(DraftedStep(answers, 5))
    assert not any(look(answers).propose(DraftedStep(answers, 5)))
    assert len(model.asked) == 1


def test_a_model_that_pays_for_one_answer_rests_where_several_lose_by_it() -> None:
    drafting = Drafting(DraftPolicy(), model=Model())
    drafting.policy.model_length = lambda *_: 2  # type: ignore[method-assign]  # thinks that it pays
    for together in (1, 4):
        begun_answers = [begun(drafting, [*range(place, 40 + place)]) for place in range(together)]
        answers = [asking(drafter, session, row=row) for row, (drafter, session) in enumerate(begun_answers)]
        for _ in range(400):
            drafts = look(answers).propose(DraftedStep(answers, together))
            worked = any(drafts)
            for each in answers if worked else ():
                each.drafter.record_outcome(2, 1, Lifecycle(0, 0, 0))
            # A token more for each: in a round of 15 ms for one answer, and of 50 ms for four.
            seconds = (0.015 if together == 1 else 0.05) if worked else 0.01
            step = StepTime(seconds, together * (2 if worked else 1), together, 3 if worked else 1, 3 if worked else 1)
            drafting.record_time([each.drafter for each in answers], step)
        for each in answers:
            each.drafter.close()
        assert (state := drafting.counts().model) is not None
        assert state.state == ("on" if together == 1 else "resting"), "as it is for so many answers"
    assert drafting.speed(1, by_model=True).state.name == "on"


def test_an_answer_that_gains_nothing_falls_behind_by_a_tenth_of_a_second_at_most() -> None:
    """Three of four answers quote, and rounds bring them eight tokens for each one of the fourth."""
    drafting, spent_s, rounds = ready(), 0.0, 0
    for rows in [*range(1, 17)] * 40:
        drafting.policy.record_time(rows, 0.01 * (1 + rows), 100, 4)
    begun_answers = [begun(drafting, [*QUOTED, 7, *QUOTED[:20]]) for _ in range(3)] + [begun(drafting, [1, 2, 3])]
    answers = [asking(drafter, session, row=row) for row, (drafter, session) in enumerate(begun_answers)]
    for number in range(1, 601):
        drafts = look(answers).propose(DraftedStep(answers, 4))
        rounds += any(drafts)
        for each, its in zip(answers, drafts, strict=True):
            if its:
                each.drafter.record_outcome(len(its), len(its), Lifecycle(0, 0, 0))
            begin = QUOTED.index(each.session.recorded[-1]) + 1 if each.row < 3 else 0
            come = [QUOTED[(begin + place) % len(QUOTED)] for place in range(1 + len(its))]
            each.session.recorded.extend(come if each.row < 3 else [1000 + number])
        rows = 1 + max(map(len, drafts))
        spent_s += 0.01 * (1 + rows)
        tokens = len(answers) + sum(map(len, drafts))
        drafting.record_time([each.drafter for each in answers], StepTime(0.01 * (1 + rows), tokens, 4, rows, rows))
        assert 0.02 * number >= 0.95 * spent_s - 0.11
    assert rounds > 10


def test_a_model_drafts_beside_known_text_as_many_tokens_as_would_be_padded() -> None:
    model = Model()
    drafting = Drafting(DraftPolicy(first_costs=GPU_COSTS), model=model)
    drafting.policy.model_length = lambda *_: 7  # type: ignore[method-assign]  # as it was when nothing was known
    drafting.policy.record_time(1, 0.01, 40, 2)
    quoting, session = begun(drafting, [*QUOTED, 7, *QUOTED[:20]])
    other, silent = begun(drafting, [*range(40)])
    answers = [asking(quoting, session, 3), asking(other, silent, row=1)]
    quoted, found = look(answers).propose(DraftedStep(answers, 2))
    assert [*quoted] == QUOTED[20 : 20 + len(quoted)]
    assert [*found] == [8, 9, 10][: len(quoted)]
    assert model.asked == [len(quoted)]
    for drafter, drafts in ((quoting, quoted), (other, found)):
        drafter.record_outcome(len(drafts), len(drafts), Lifecycle(0, 0, 0))
    assert drafting.counts().accepted["own"] == len(quoted)
    assert drafting.counts().accepted["model"] == len(found)
