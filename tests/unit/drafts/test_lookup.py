"""Drafts for one request: from its own text, then from the ring; and what the ring keeps for whom."""

import random

import pytest

from runner.drafts import text
from runner.drafts import text as chain
from runner.drafts.draft_policy import Draft
from runner.drafts.lookup import Lookup, Ring
from tests.unit.drafts.test_text import nbytes_of


def lookup(prompt: list[int], ring: Ring | None = None, salt: str = "") -> Lookup:
    made = Lookup(prompt, ring or Ring(), salt)
    while not made.index(100):
        pass
    made.extend([])
    return made


def ring_of(*texts: list[int], salt: str = "", most_tokens: int = 1 << 16) -> Ring:
    ring = Ring(most_tokens)
    for tokens in texts:
        ring.add(tokens, salt)
    while not ring.index(100):
        pass
    return ring


def test_what_followed_in_the_prompt_is_proposed() -> None:
    assert lookup([1, 2, 3, 4, 5, 9, 1, 2, 3]).propose(2) == Draft([4, 5], "own", 3)
    assert lookup([1, 2, 3, 4]).propose(2) is None
    assert lookup([1]).propose(2) is None
    assert lookup([]).propose(2) is None


def test_the_answer_is_part_of_the_text() -> None:
    request = lookup([9, 8])
    request.extend([1, 2, 3, 4, 1])
    assert request.propose(4) is None
    request.extend([2])
    assert request.propose(2) == Draft([3, 4], "own", 2)
    request.extend([3, 7])
    assert request.propose(2) is None
    request.extend([1, 2, 3])
    assert request.propose(2) == Draft([7, 1], "own", 3), "the newest of two"


def test_drafts_do_not_depend_on_when_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_MOST_PLACES", 1 << 30)
    monkeypatch.setattr(chain, "_MOST_STEPS", 1 << 30)
    rng = random.Random(1)
    ring = ring_of(*([rng.randrange(4) for _ in range(100)] for _ in range(3)))
    asked, said = lookup([], ring), list[int]()
    for _ in range(200):
        token = rng.randrange(4)
        said.append(token)
        asked.extend([token])
        assert asked.propose(4) == lookup(said, ring).propose(4)


def test_a_prompt_is_indexed_bit_by_bit_if_nobody_did_before() -> None:
    prompt = [1, 2, 3, *range(100, 1000)]
    request = Lookup(prompt, Ring())
    request.extend([1, 2])
    assert request.propose(1) == Draft([3], "own", 2)
    for _ in range(3):
        assert request.propose(1) == Draft([3], "own", 2)
    request.extend([990, 991])
    assert request.propose(1) is None
    for _ in range(4):
        request.extend([5])
    request.extend([990, 991])
    assert request.propose(1) == Draft([5], "own", 2), "the answer is indexed too, in its turn"


def test_earlier_answers_are_proposed_if_their_match_is_longer() -> None:
    ring = ring_of([1, 2, 3, 4, 5, 6])
    assert lookup([1, 2, 3, 4], ring).propose(3) == Draft([5, 6], "earlier", 4)
    assert lookup([1, 2, 3], ring).propose(3) is None, "too short to say anything"
    assert lookup([3, 4, 9, 1, 2, 3, 4], ring).propose(3) == Draft([5, 6], "earlier", 4)
    assert lookup([1, 2, 3, 4, 9, 1, 2, 3, 4], ring).propose(1) == Draft([9], "own", 4), "own text first"
    assert lookup([1, 2, 3, 4, 5, 6], ring).propose(1) is None, "nothing came behind it"


def test_a_request_that_comes_again_is_proposed_whole() -> None:
    prompt, answer = list(range(1000)), list(range(5000, 5100))
    first = lookup(prompt)
    first.extend(answer)
    assert first.kept() == prompt[-64:] + answer
    ring = ring_of(first.kept())
    second, at = lookup(prompt, ring), 0
    while at < len(answer):
        draft = second.propose(8)
        assert draft
        assert draft.source == "earlier"
        assert draft.tokens == answer[at : at + 8]
        second.extend(draft.tokens)
        at += len(draft.tokens)


def test_salts_are_kept_apart() -> None:
    ring = ring_of([1, 2, 3, 4, 5], salt="one")
    ring.add([1, 2, 3, 4, 6], "two")
    while not ring.index(100):
        pass
    assert lookup([1, 2, 3, 4], ring, "one").propose(1) == Draft([5], "earlier", 4)
    assert lookup([1, 2, 3, 4], ring, "two").propose(1) == Draft([6], "earlier", 4)
    assert lookup([1, 2, 3, 4], ring, "three").propose(1) is None


def test_many_salts_and_long_texts_stay_within_the_bounds() -> None:
    most = 1 << 15
    ring = Ring(most)
    for number in range(500):
        ring.add(range(10), salt=str(number))
        while not ring.index(1000):
            pass
    assert sum(nbytes_of(part.text) for part in ring._parts) <= 32 * most
    assert ring.find(list(range(5)), "499")
    assert not ring.find(list(range(5)), "0")
    ring.add(range(3 * most))
    while not ring.index(1000):
        pass
    assert sum(nbytes_of(part.text) for part in ring._parts) <= 32 * most
    assert ring.find(list(range(3 * most - 40, 3 * most - 10)))
    assert not ring.find(list(range(40)))


def test_texts_are_added_in_pieces_and_a_queue_is_bounded() -> None:
    ring = Ring(1 << 16)
    assert ring.index(1)
    ring.add(range(100))
    ring.add(range(200, 300))
    steps = 0
    while not ring.index(10):
        steps += 1
    assert 20 <= steps <= 24
    assert ring.find([298, 297, 296]) is None
    assert ring.find(list(range(210, 220)))
    for number in range(1000):
        ring.add([number] * 5)
    steps = 0
    while not ring.index(10):
        steps += 1
    assert steps < 200
