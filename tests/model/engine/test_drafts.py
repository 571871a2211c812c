"""An answer is the same with drafts as without them, whatever the drafts are, and so is what the cache keeps of it."""

import random
from collections.abc import Callable
from itertools import count

import pytest

from scripts.tools.models.tiny import words
from tests.lib.tiny_engine import ClientRequest, RandomPolicy, TinyEngine, oracle_answer, text_of
from tests.lib.told_drafts import DRAFTABLE, OPTIONS, STRATEGIES, conversation, spec, told


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", DRAFTABLE)
def test_drafts_change_nothing(name: str, options: str, strategy: str) -> None:
    asked = spec(options)
    wanted, _ = conversation(name, asked)
    found, drafters = conversation(name, asked, strategy)
    assert found == wanted
    rounds = [each for drafter in drafters for each in drafter.rounds]
    assert rounds
    if strategy == "right":
        assert all(drafts == right for drafts, right in rounds)
    if strategy == "wrong":
        assert not any(right for _, right in rounds)


@pytest.mark.parametrize("strategy", ["right", "random"])
@pytest.mark.parametrize("cache", ["single", "none"])
@pytest.mark.parametrize("name", DRAFTABLE)
def test_every_cache_keeps_the_same(name: str, cache: str, strategy: str) -> None:
    asked = spec("drawn")
    wanted, _ = conversation(name, asked, cache=cache)
    found, _ = conversation(name, asked, strategy, cache)
    assert found == wanted


@pytest.mark.parametrize("strategy", ["right", "random"])
@pytest.mark.parametrize("place", range(1, 12))
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_an_answer_may_end_anywhere_in_a_round(name: str, place: int, strategy: str) -> None:
    """By an end-of-sequence token, a stop string, or its length: the cache keeps what it keeps without drafts."""
    asked = spec("drawn", 12)
    answer = oracle_answer(name, asked).tokens
    token = answer[place - 1]
    for changes in ({"eos": frozenset({token})}, {"stop": text_of([token])}, {"max_tokens": place}):
        ends = asked._replace(**changes)
        wanted, _ = conversation(name, ends)
        found, _ = conversation(name, ends, strategy)
        assert found == wanted, changes


def at_call(number: int) -> Callable[[int, int], bool]:
    """Breaks one call of the model."""
    calls = count(1)
    return lambda rows, length: next(calls) == number


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "falcon_h1", "quantized", "llama4"])
def test_requests_that_come_and_go(name: str, seed: int) -> None:
    """Joins, leaves, cancels, restarts for want of memory, and evictions, among rounds."""
    numbers = random.Random(seed)
    engine = TinyEngine(name, RandomPolicy(numbers), budget=600_000, parallel=4)
    drafters = told(engine, "random")
    for number in range(12):
        options = numbers.choice([*OPTIONS])
        prompt = (*words(numbers.choice((20, 30, 40)), number % 3), *words(number % 5, 9))
        engine.submit(spec(options, numbers.randint(3, 16), prompt=prompt))
        engine.advance(numbers.randint(0, 25))
        if numbers.random() < 0.2:
            numbers.choice(engine.requests).request.cancel()
        if numbers.random() < 0.2:
            engine.forward.error = MemoryError
            engine.forward.breaks = at_call(numbers.randint(1, 3))
    engine.forward.breaks = lambda rows, length: False
    engine.finish()
    engine.check()
    assert any(drafter.rounds for drafter in drafters)


def test_nothing_is_drafted_beside_another_answer() -> None:
    engine = TinyEngine("llama4")  # whose answers do not share batches
    drafters = told(engine, "right")
    for asked in (spec("greedy", 60), spec("drawn", 12, prompt=words(20, 5))):
        engine.submit(asked)
    engine.until(lambda: len(engine.scheduler.batches.all) == 2)
    before = [len(drafter.rounds) for drafter in drafters]
    engine.until(lambda: len(engine.scheduler.batches.all) == 1)
    assert [len(drafter.rounds) for drafter in drafters] == before
    engine.finish()
    assert any(len(drafter.rounds) > rounds for drafter, rounds in zip(drafters, before, strict=True))
    engine.check()


def test_a_request_may_limit_its_drafts() -> None:
    engine = TinyEngine("llama")
    drafters = told(engine, "right")
    limited = ClientRequest(engine.kind, spec("greedy"))
    limited.request.most_drafts = 2
    engine.requests.append(limited)
    engine.scheduler.add(limited.request)
    engine.finish()
    engine.check()
    assert {drafts for drafts, _ in drafters[0].rounds} <= {1, 2}
