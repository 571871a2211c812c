"""Requests with a common prefix compute it once, also while they run.

The tokens of all forwards are counted. An answer of one token computes only the part of its prompt that is not cached,
so the counts show whether any token was computed twice.
"""

import logging

import pytest

from runner.engine.policy import SlicePolicy
from scripts.tools.models.tiny import words
from tests.lib.tiny_engine import ClientRequest, TinyEngine

SHARED = words(200)
requests = pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])


def make_engine(name: str, chunk: int = 48, parallel: int = 8) -> TinyEngine:
    return TinyEngine(name, SlicePolicy(chunk, 0.1), parallel=parallel)


def together(engine: TinyEngine, suffixes: list[list[int]], max_tokens: int = 1) -> list[ClientRequest]:
    return [engine.ask([*SHARED, *suffix], max_tokens) for suffix in suffixes]


def suffix(number: int, length: int = 8) -> list[int]:
    """Returns a suffix with another first token for every number up to 63. Before a shorter one the cache keeps a
    checkpoint, too, which is close enough to the point where two prompts diverge to begin there."""
    return [number, *words(length - 1, number)]


@requests
def test_requests_that_are_sent_together_compute_their_prefix_once(name: str) -> None:
    engine = make_engine(name)
    asked = together(engine, [suffix(number, 8 + number) for number in range(8)])
    engine.finish()
    engine.check()
    assert [each.cached for each in asked] == [0] + [len(SHARED)] * 7
    assert engine.forward.tokens == len(SHARED) + sum(8 + number for number in range(8))


@requests
def test_when_the_leader_fails_a_follower_takes_its_place(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = make_engine(name)
    first, second, third = together(engine, [suffix(number) for number in range(3)])
    engine.forward.breaks = lambda rows, length: len(engine.forward.calls) == 3
    engine.finish()
    engine.check()
    assert first.failed
    assert third.cached == 200
    assert engine.forward.tokens == 3 * 48 + (208 - second.cached) + 8


def test_requests_that_wait_for_a_prefix_hold_a_place() -> None:
    engine = make_engine("llama", parallel=3)
    asked = together(engine, [suffix(number) for number in range(5)])
    engine.advance(4)
    assert [engine.phase(each) for each in asked] == [
        "prefilling",
        "awaiting prefix",
        "awaiting prefix",
        "queued",
        "queued",
    ]
    assert [each.started for each in asked] == [True] * 3 + [False] * 2
    engine.finish()
    engine.check()


@pytest.mark.parametrize("others", [0, 1])
def test_no_request_waits_for_the_answer_of_another(others: int) -> None:
    engine = make_engine("llama")
    first = engine.ask(words(60), 200)
    for _ in range(others):
        engine.ask(words(60, 2), 200)
    engine.until(lambda: len(first.tokens) > 60)
    assert engine.phase(first) == ("batch" if others else "alone")
    late = engine.ask([*words(60), *first.tokens[:50], 1, 2], 1)
    since = engine.slices
    engine.until(lambda: late.finished is not None)
    assert engine.slices - since < 12
    assert late.cached >= 59
    first.request.cancel()
    engine.finish()
    engine.check()


def test_a_few_tokens_in_common_are_not_worth_waiting_for() -> None:
    engine = make_engine("llama")
    asked = [engine.ask([*SHARED[:20], *suffix(number, 50)], 1) for number in range(3)]
    engine.advance(3)
    assert [engine.phase(each) for each in asked] == ["prefilling"] * 3
    engine.finish()
    engine.check()


def test_a_request_finds_the_room_of_a_leader_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other event would make the scheduler look again."""
    engine = make_engine("llama")
    memory = engine.scheduler.memory
    memory.budget_bytes = 1 << 40
    first, second = together(engine, [suffix(0), suffix(1)], 5)
    engine.until(lambda: engine.phase(second) == "awaiting prefix")
    monkeypatch.setattr(memory, "admits", lambda *_: not memory._running)  # as far as it knows who runs
    engine.advance()
    assert engine.phase(first) == "prefilling"
    first.request.cancel()
    engine.finish()
    second.check_answer()
