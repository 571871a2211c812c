"""Several requests within a budget: they wait, are refused or take turns; nothing else suffers, and nothing leaks."""

import gc

import mlx.core as mx
import pytest

from runner.engine.events import Refused
from runner.engine.policy import SlicePolicy
from scripts.tools.models.tiny import KINDS, words
from tests.lib.company import BATCHABLE, Company
from tests.lib.memory import held_bytes

TOKEN_BYTES = 256
"""Of the llama: two layers, keys and values, two heads, eight float32 each. A layer grows by 256 tokens at a time."""


def budget(tokens: int) -> int:
    """Enough for the layers of so many tokens."""
    return tokens * TOKEN_BYTES


def most_open(users: Company) -> int:
    """Goes on to the end; how many sessions were open at once."""
    most = 0
    while not users.running.idle:
        users.advance()
        most = max(most, users.trie.describe().sessions)
    return most


def company(tokens: int | None, room_tokens: int | None = None) -> Company:
    room = None if room_tokens is None else budget(room_tokens)
    return Company("llama", SlicePolicy(64, 0.1), budget=None if tokens is None else budget(tokens), room=room)


def test_a_request_waits_while_there_is_no_room_and_begins_then() -> None:
    users = company(1300)  # the second counts as 500 and 256 for its answer
    first, second = users.ask(words(600), 100), users.ask(words(500, 2), 20)
    users.until(lambda: len(first.tokens) > 50)
    assert users.phase(second) == "waiting"
    assert not second.started
    users.until(lambda: first.finished is not None)
    assert users.phase(second) == "waiting"
    users.advance(3)
    assert second.started
    users.finish()
    users.check()


def test_a_request_that_finds_room_does_not_wait() -> None:
    users = company(1400)
    first, second = users.ask(words(600), 100), users.ask(words(500, 2), 20)
    users.until(lambda: len(first.tokens) > 50)
    assert second.started
    users.finish()
    users.check()


def test_the_first_request_in_the_queue_is_not_overtaken_by_a_smaller_one() -> None:
    users = company(1400)
    first = users.ask(words(600), 100)
    users.until(lambda: len(first.tokens) > 10)
    large, small = users.ask(words(700, 2), 5), users.ask(words(10, 3), 5)
    users.until(lambda: first.finished is not None)
    assert not large.started
    assert not small.started
    users.finish()
    users.check()


def test_what_a_request_takes_is_known_from_its_first_forward_on() -> None:
    users = company(800)
    for number in range(5):
        users.ask(words(300, 2 * number), 20)
    assert most_open(users) == 1
    users.check()


@pytest.mark.parametrize("length", [1, 2, 300])
def test_the_second_request_waits_for_the_first_forward_and_no_longer(length: int) -> None:
    users = company(5000)
    users.ask(words(length), 200)
    second = users.ask(words(300, 2), 5)
    users.advance(2)
    assert not second.started
    users.advance(4)
    assert second.started
    users.finish()
    users.check()


def test_without_a_budget_nobody_waits_for_the_first_forward() -> None:
    users = company(None)
    for number in range(5):
        users.ask(words(300, 2 * number), 20)
    users.advance(5)
    assert users.trie.describe().sessions == 5
    users.finish()
    users.check()


def test_those_behind_another_one_need_room_as_well() -> None:
    users = company(1400)
    for number in range(5):
        users.ask([*words(400), *words(8, number)], 30)
    assert most_open(users) == 2
    users.check()
    assert all(each.cached >= 400 for each in users.everyone[1:])


@pytest.mark.parametrize("shared", [0, 200])
def test_one_request_always_runs_however_small_the_budget(shared: int) -> None:
    users = company(100)
    for number in range(3):
        users.ask([*words(shared, 50), *words(100, 2 * number)], 10)
    assert most_open(users) == 1
    users.check()
    assert users.trie.admits(10_000)


# --- refusal


def test_a_prompt_that_the_device_has_no_room_for_is_refused_and_nothing_else_suffers() -> None:
    users = company(None, room_tokens=1000)
    running = users.ask(words(100), 60)
    users.until(lambda: len(running.tokens) > 5)
    large, small = users.ask(words(1100, 2), 5), users.ask(words(50, 3), 5)
    users.finish()
    (event,) = large.told
    assert isinstance(event, Refused)
    for part in ("1100 tokens", "281.6 KB", "256.0 KB", "Shorten the prompt"):
        assert part in event.text
    assert large.session is None
    assert small.finished
    users.check()


@pytest.mark.parametrize("before", [1, 300])
def test_a_prompt_that_fits_is_not_refused_whatever_came_before(before: int) -> None:
    users = company(None, room_tokens=1024)  # layers grow by 256
    users.ask(words(before), 1)
    users.finish()
    asked = users.ask(words(900, 2), 1)
    users.finish()
    asked.check_answer()


# --- batches


def test_answers_for_whose_batch_there_is_no_room_take_turns() -> None:
    users = company(1600)  # for two sessions of 512 tokens, and not for two rows of 310 more
    first, second = users.ask(words(300), 60), users.ask(words(310, 2), 60)
    users.until(lambda: len(first.tokens) > 20)
    steps = len(second.tokens)
    assert steps
    users.finish()
    users.check()
    assert users.forward.most_rows == 1


def test_batches_count_as_long_as_they_last() -> None:
    users = company(5000)
    asked = [users.ask(words(300, 2 * number), 20 + number) for number in range(3)]
    seen = set()
    while not users.running.idle:
        users.advance()
        held = sum(group.nbytes for group in users.running._groups)
        reserved = users.trie.describe().reserved_bytes
        assert reserved <= held <= reserved + 3 * budget(256)
        assert (reserved > 0) == (held > 0)
        seen.add(max((len(group.generations) for group in users.running._groups), default=0))
        assert users.trie.nbytes <= budget(5000)
    assert seen == {0, 1, 2, 3}
    assert all(each.finished for each in asked)
    users.check()


def test_two_short_answers_and_a_long_one_are_not_padded_to_its_length() -> None:
    users = company(None)
    long = users.ask(words(2000), 60)
    shorts = [users.ask(words(20, 2 * number + 3), 60) for number in range(2)]
    users.until(lambda: all(len(each.tokens) > 10 for each in users.everyone))
    rows = sorted(len(group.generations) for group in users.running._groups)
    assert rows == [1, 2]
    steps = [len(each.tokens) for each in users.everyone]
    users.advance(20)
    assert [len(each.tokens) - before for each, before in zip(users.everyone, steps, strict=True)] == [10] * 3
    users.finish()
    users.check()
    assert long.finished
    assert all(each.finished for each in shorts)


@pytest.mark.parametrize("name", KINDS)
def test_afterwards_the_device_holds_what_the_cache_counts(name: str) -> None:
    def play(users: Company) -> None:
        asked = [users.ask([*words(70 - number), number], 6 + number, temperature=0.5, seed=1) for number in range(5)]
        users.until(lambda: any(each.finished for each in asked))
        asked[-1].request.cancel()
        users.finish()

    play(Company(name))  # what is made once
    limit = mx.set_cache_limit(0)
    try:
        gc.collect()
        before = held_bytes()
        users = Company(name, SlicePolicy(32, 0.1))
        play(users)
        users.check_cache()
        assert (users.forward.most_rows > 1) == (name in BATCHABLE)
        gc.collect()
        held = held_bytes() - before
        assert 0 < users.trie.nbytes <= held <= users.trie.nbytes + 8192  # and some scalars of mlx-lm's
        users.trie.clear()
        users.trie._sequences.kept.reset()
    finally:
        mx.set_cache_limit(limit)
    users.check()
