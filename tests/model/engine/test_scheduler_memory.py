"""Several requests within a budget: they wait, are refused or take turns. Nothing else is affected, nothing leaks."""

import pytest

from runner.engine.policy import SlicePolicy
from scripts.tools.models.tiny import words
from tests.lib.tiny_engine import TinyEngine

TOKEN_BYTES = 256
"""Of the llama: two layers, keys and values, two heads, eight float32 each. A layer grows by 256 tokens at a time."""


def budget(tokens: int) -> int:
    """Returns a budget for the layers of so many tokens."""
    return tokens * TOKEN_BYTES


def most_open(engine: TinyEngine) -> int:
    """Runs to the end; returns the most sessions that were open at once."""
    most = 0
    while not engine.scheduler.idle:
        engine.advance()
        most = max(most, len(engine.trie.sequences.sessions))
    return most


def make_engine(tokens: int | None, room_tokens: int | None = None) -> TinyEngine:
    room = None if room_tokens is None else budget(room_tokens)
    return TinyEngine("llama", SlicePolicy(64, 0.1), budget=None if tokens is None else budget(tokens), room=room)


def test_a_request_waits_while_there_is_no_room_and_begins_then() -> None:
    engine = make_engine(1300)  # the second counts as 500 and 256 for its answer
    first, second = engine.ask(words(600), 100), engine.ask(words(500, 2), 20)
    engine.until(lambda: len(first.tokens) > 50)
    assert engine.phase(second) == "queued"
    assert not second.started
    engine.until(lambda: first.finished is not None)
    assert engine.phase(second) == "queued"
    engine.advance(3)
    assert second.started
    engine.finish()
    engine.check()


def test_the_first_request_in_the_queue_is_not_overtaken_by_a_smaller_one() -> None:
    engine = make_engine(1400)
    first = engine.ask(words(600), 100)
    engine.until(lambda: len(first.tokens) > 10)
    large, small = engine.ask(words(700, 2), 5), engine.ask(words(10, 3), 5)
    engine.until(lambda: first.finished is not None)
    assert not large.started
    assert not small.started
    engine.finish()
    engine.check()


@pytest.mark.parametrize("length", [1, 300])
def test_the_second_request_waits_for_the_first_forward_and_no_longer(length: int) -> None:
    engine = make_engine(5000)
    engine.ask(words(length), 200)
    second = engine.ask(words(300, 2), 5)
    engine.advance(2)
    assert not second.started
    engine.advance(4)
    assert second.started
    engine.finish()
    engine.check()


def test_requests_that_wait_for_a_prefix_need_room_as_well() -> None:
    engine = make_engine(1400)
    for number in range(5):
        engine.ask([*words(400), *words(8, number)], 30)
    assert most_open(engine) == 2
    engine.check()
    assert all(each.cached >= 400 for each in engine.requests[1:])


@pytest.mark.parametrize("shared", [0, 200])
def test_one_request_always_runs_however_small_the_budget(shared: int) -> None:
    engine = make_engine(100)
    for number in range(3):
        engine.ask([*words(shared, 50), *words(100, 2 * number)], 10)
    assert most_open(engine) == 1
    engine.check()
    assert engine.trie.admits(10_000)


def test_answers_for_whose_batch_there_is_no_room_take_turns() -> None:
    engine = make_engine(1600)  # for two sessions of 512 tokens, and not for two rows of 310 more
    first, second = engine.ask(words(300), 60), engine.ask(words(310, 2), 60)
    engine.until(lambda: len(first.tokens) > 20)
    steps = len(second.tokens)
    assert steps
    engine.finish()
    engine.check()
    assert engine.forward.most_rows == 1


def test_batches_count_as_long_as_they_last() -> None:
    engine = make_engine(5000)
    asked = [engine.ask(words(300, 2 * number), 20 + number) for number in range(3)]
    seen = set()
    while not engine.scheduler.idle:
        engine.advance()
        held = sum(group.nbytes for group in engine.scheduler.batches.all)
        assert engine.trie.reserved_bytes <= held <= engine.trie.reserved_bytes + 3 * budget(256)
        assert (engine.trie.reserved_bytes > 0) == (held > 0)
        seen.add(max((len(group.generations) for group in engine.scheduler.batches.all), default=0))
        assert engine.trie.nbytes <= budget(5000)
    assert seen == {0, 1, 2, 3}
    assert all(each.finished for each in asked)
    engine.check()


def test_two_short_answers_and_a_long_one_are_not_padded_to_its_length() -> None:
    engine = make_engine(None)
    long = engine.ask(words(2000), 60)
    shorts = [engine.ask(words(20, 2 * number + 3), 60) for number in range(2)]
    engine.until(lambda: all(len(each.tokens) > 10 for each in engine.requests))
    rows = sorted(len(group.generations) for group in engine.scheduler.batches.all)
    assert rows == [1, 2]
    steps = [len(each.tokens) for each in engine.requests]
    engine.advance(20)
    assert [len(each.tokens) - before for each, before in zip(engine.requests, steps, strict=True)] == [10] * 3
    engine.finish()
    engine.check()
    assert long.finished
    assert all(each.finished for each in shorts)
