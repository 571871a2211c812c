"""Requests that begin with the same tokens compute them once, also while they run.

The counts are those of the forwards: with one token to say, a request computes its prompt but for what it found, so the
tokens of all forwards tell whether anything was computed twice.
"""

import logging

import pytest

from runner.engine.policy import SlicePolicy
from scripts.tools.models.tiny import KINDS, words
from tests.lib.company import SLICEABLE, Asked, Company

SHARED = words(200)
everyone = pytest.mark.parametrize("name", KINDS)


def company(name: str, chunk: int = 48, parallel: int = 8) -> Company:
    return Company(name, SlicePolicy(chunk, 0.1), parallel=parallel)


def together(company: Company, suffixes: list[list[int]], max_tokens: int = 1) -> list[Asked]:
    return [company.ask([*SHARED, *suffix], max_tokens) for suffix in suffixes]


def suffix(number: int, length: int = 8) -> list[int]:
    """Another first token for every number up to 63. Of a shorter one the cache keeps the place before it, too, which
    is near enough to where two prompts part for beginning there."""
    return [number, *words(length - 1, number)]


@everyone
def test_requests_that_are_sent_together_compute_their_prefix_once(name: str) -> None:
    users = company(name)
    asked = together(users, [suffix(number, 8 + number) for number in range(8)])
    users.finish()
    users.check()
    assert [each.cached for each in asked] == [0] + [len(SHARED)] * 7
    assert users.forward.tokens == len(SHARED) + sum(8 + number for number in range(8))


@everyone
def test_the_same_prompt_twice_is_computed_once(name: str) -> None:
    users = company(name)
    first, second = together(users, [suffix(1)] * 2, max_tokens=4)
    users.finish()
    users.check()
    # Elsewhere the place before the last four tokens is kept, and what follows is not worth waiting for.
    assert (first.cached, second.cached) == (0, len(SHARED) + (7 if name in SLICEABLE else 4))
    assert first.tokens == second.tokens


@everyone
def test_those_who_follow_a_follower_share_with_it_too(name: str) -> None:
    users = company(name)
    branch = words(100, 9)
    together(users, [suffix(60), [*branch, *suffix(1)], [*branch, *suffix(3)]])
    users.finish()
    users.check()
    assert [each.cached for each in users.everyone] == [0, 200, 300]
    assert users.forward.tokens == 208 + 108 + 8


@everyone
def test_when_the_one_ahead_is_cancelled_another_goes_on_from_there(name: str) -> None:
    users = company(name)
    first, second, third = together(users, [suffix(number) for number in range(3)])
    users.until(lambda: users.phase(third) == "behind" and users.forward.tokens >= 96)
    first.request.cancel()
    users.finish()
    users.check()
    assert (second.cached, third.cached) == (96, 200)
    assert users.forward.tokens == 200 + 8 + 8


@everyone
def test_when_the_one_ahead_fails_another_takes_its_place(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    users = company(name)
    first, second, third = together(users, [suffix(number) for number in range(3)])
    users.forward.breaks = lambda rows, length: len(users.forward.calls) == 3
    users.finish()
    users.check()
    assert first.failed
    assert third.cached == 200
    assert users.forward.tokens == 3 * 48 + (208 - second.cached) + 8


@everyone
def test_those_who_wait_for_another_do_so_within_the_places(name: str) -> None:
    users = company(name, parallel=3)
    asked = together(users, [suffix(number) for number in range(5)])
    users.advance(4)
    assert [users.phase(each) for each in asked] == ["prefilling", "behind", "behind", "waiting", "waiting"]
    assert [each.started for each in asked] == [True] * 3 + [False] * 2
    users.finish()
    users.check()


@pytest.mark.parametrize("name", SLICEABLE)
@pytest.mark.parametrize("others", [0, 2])
def test_who_comes_while_another_decodes_shares_its_prompt(name: str, others: int) -> None:
    users = company(name)
    first = users.ask([*SHARED, 1], 40)
    for number in range(others):
        users.ask(words(150 + number, 7 + number), 30)
    users.until(lambda: len(first.tokens) > 10)
    late = users.ask([*SHARED, 2, 3], 4)
    users.until(lambda: late.finished is not None)
    assert first.finished is None
    assert late.cached == len(SHARED)
    users.finish()
    users.check()


@pytest.mark.parametrize("others", [0, 1])
def test_nobody_waits_for_what_another_is_about_to_say(others: int) -> None:
    users = company("llama")
    first = users.ask(words(60), 200)
    for _ in range(others):
        users.ask(words(60, 2), 200)
    users.until(lambda: len(first.tokens) > 60)
    assert users.phase(first) == ("batch" if others else "alone")
    late = users.ask([*words(60), *first.tokens[:50], 1, 2], 1)
    since = users.slices
    users.until(lambda: late.finished is not None)
    assert users.slices - since < 12
    assert late.cached >= 59
    first.request.cancel()
    users.finish()
    users.check()


def test_a_few_tokens_in_common_are_not_worth_waiting_for() -> None:
    users = company("llama")
    asked = [users.ask([*SHARED[:20], *suffix(number, 50)], 1) for number in range(3)]
    users.advance(3)
    assert [users.phase(each) for each in asked] == ["prefilling"] * 3
    users.finish()
    users.check()


def test_who_waits_for_another_may_leave() -> None:
    users = company("llama")
    _, second, third = together(users, [suffix(number) for number in range(3)])
    users.advance(4)
    assert users.phase(second) == "behind"
    second.request.cancel()
    users.advance()
    assert users.phase(second) == "gone"
    users.finish()
    users.check()
    assert third.cached == 200
    assert second.session is None


def test_who_waits_for_another_that_leaves_finds_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else happens then: nobody would look again."""
    users = company("llama")
    memory = users.running.memory
    memory.budget_bytes = 1 << 40
    first, second = together(users, [suffix(0), suffix(1)], 5)
    users.until(lambda: users.phase(second) == "behind")
    monkeypatch.setattr(memory, "admits", lambda *_: not memory._rows)  # as far as it knows who runs
    users.advance()
    assert users.phase(first) == "prefilling"
    first.request.cancel()
    users.finish()
    second.check_answer()
