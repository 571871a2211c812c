"""Pictures among the slices: they take turns with prompts, and leave the answers their gaps."""

import pytest

from runner.engine.policy import AdvanceTrial, Begin, Decode, Encode, Prefill, Slice, SlicePolicy, View

CHUNK, GAP_S = 512, 0.1


@pytest.fixture
def policy() -> SlicePolicy:
    return SlicePolicy(CHUNK, GAP_S)


def take(
    policy: SlicePolicy, view: View, *, step_s: float = 0.01, encode_s: float = 0.03, prefill_s: float = 0.02
) -> Slice:
    """Computes the next slice."""
    chosen = policy.next(view)
    assert chosen is not None
    assert chosen == policy.next(view), "`next` changes nothing"
    policy.took(chosen, view, {Decode: step_s, Encode: encode_s, Prefill: prefill_s}.get(type(chosen), 0.0))
    return chosen


def kinds(policy: SlicePolicy, view: View, count: int, **costs: float) -> list[type[Slice]]:
    return [type(take(policy, view, **costs)) for _ in range(count)]


def test_a_picture_alone_is_encoded_at_once(policy: SlicePolicy) -> None:
    assert kinds(policy, View(encoding=1), 5) == [Encode] * 5
    assert policy.next(View()) is None


def test_a_new_request_begins_before_a_picture_is_encoded(policy: SlicePolicy) -> None:
    assert policy.next(View(startable=1, encoding=1)) == Begin()


def test_pictures_and_prompts_take_turns(policy: SlicePolicy) -> None:
    assert kinds(policy, View(encoding=1, prefilling=[900]), 6) == [Encode, Prefill] * 3
    assert kinds(policy, View(encoding=3, prefilling=[900, 90]), 4) == [Encode, Prefill] * 2


def test_a_prompt_that_comes_to_a_picture_leaves_the_turn_to_others(policy: SlicePolicy) -> None:
    assert kinds(policy, View(encoding=1), 2) == [Encode] * 2
    assert kinds(policy, View(prefilling=[90], encoding=1), 2) == [Prefill, Encode]
    assert kinds(policy, View(prefilling=[90]), 2) == [Prefill] * 2


@pytest.mark.parametrize("encode_s", [0.03, 0.2, 5.0])
def test_between_two_steps_of_an_answer_is_at_most_one_piece_beyond_the_gap(
    policy: SlicePolicy, encode_s: float
) -> None:
    view, since_s, gaps = View(encoding=1, decoding=[4]), 0.0, []
    for _ in range(200):
        chosen = take(policy, view, encode_s=encode_s)
        since_s += encode_s if isinstance(chosen, Encode) else 0.01
        if isinstance(chosen, Decode):
            gaps.append(since_s)
            since_s = 0.0
    assert max(gaps[2:]) <= max(GAP_S, encode_s + 0.01) + 1e-9
    assert len(gaps) < 190  # and the picture advances


def test_cheap_pieces_share_a_gap(policy: SlicePolicy) -> None:
    found = kinds(policy, View(encoding=1, decoding=[4]), 60, encode_s=0.02)
    longest = max(len(run) for run in "".join("e" if kind is Encode else " " for kind in found).split())
    assert 3 <= longest <= 4


def test_beside_an_answer_prompts_and_pictures_take_turns_too(policy: SlicePolicy) -> None:
    found = kinds(policy, View(encoding=1, prefilling=[9000], decoding=[4]), 90)
    others = [kind for kind in found if kind is not Decode]
    assert others == [[Encode, Prefill][at % 2] for at in range(len(others))]
    assert len(others) >= 20


def test_a_picture_comes_before_the_trial_of_batches(policy: SlicePolicy) -> None:
    view = View(encoding=1, decoding=[4, 5], trial=True)
    found = kinds(policy, view, 60)
    assert Encode in found
    assert AdvanceTrial not in found
    assert AdvanceTrial in kinds(policy, view._replace(encoding=0), 20)


def test_the_first_step_of_an_answer_comes_before_any_picture(policy: SlicePolicy) -> None:
    assert isinstance(policy.next(View(encoding=1, decoding=[4])), Decode)
