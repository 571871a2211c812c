"""The engine's counters are right, and cost next to nothing."""

from concurrent.futures import Future

import pytest

from protocol.stats import RequestCounts, Stats
from runner.engine.answer_grammar import Grammar
from runner.engine.events import Refused
from runner.engine.memory import MemoryBudget
from runner.engine.policy import SlicePolicy
from runner.errors import RequestError
from runner.numbers.journal import Distribution, EngineStats
from runner.numbers.wing import collect, draw_cache
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import VOCAB
from tests.lib.tiny_engine import RequestSpec, TinyEngine, ZeroMeter, parts_of, text_of

PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(100)]
OTHER = [(5 * i * i + i + 2) % VOCAB for i in range(80)]


def collected(engine: TinyEngine) -> EngineStats:
    engine.scheduler.memory = MemoryBudget(ZeroMeter(), 1 << 30, 2048)
    return collect(parts_of(engine))


def stats(engine: TinyEngine) -> Stats:
    return collected(engine).stats


def test_a_value_counts_below_the_first_bound_that_it_does_not_exceed() -> None:
    distribution = Distribution((1, 2, 5))
    for value in (0.5, 1.0, 1.5, 2.0, 5.0, 5.5, 100.0):
        distribution.count(value)
    assert distribution.bounds == (1.0, 2.0, 5.0)
    assert distribution.counts == [2, 2, 1, 2]
    assert distribution.total == 115.5


def test_tokens_of_prompts_are_counted_by_where_they_came_from() -> None:
    engine = TinyEngine("llama")
    first = engine.ask(PROMPT, 6)
    engine.finish()
    again = engine.ask([*PROMPT[:60], *OTHER[:20]], 4)
    engine.finish()
    tokens = stats(engine).tokens
    assert (first.cached, again.cached) == (0, 60)
    assert (tokens.prompt, tokens.matched, tokens.cached, tokens.recomputed) == (180, 60, 60, 120)
    assert (tokens.generated, tokens.forced) == (10, 0)


@pytest.mark.parametrize(
    ("grammar", "generated", "forced"),
    [
        ('start: /[0-9]/ "<=======>" /[0-9]/ "!"', 12, 10),
        ('start: "<<<<<<<<" /[0-9]/ ">"', 10, 9),
        ('start: "<<<<>>>>"', 8, 8),
        ("start: /[0-9]{5}/", 5, 0),
    ],
)
def test_tokens_without_an_alternative_count_as_forced(grammar: str, generated: int, forced: int) -> None:
    engine = TinyEngine("llama")
    engine.submit(RequestSpec(tuple(PROMPT), 40, SamplingOptions(), grammar=grammar))
    engine.finish()
    told = collected(engine)
    assert (told.stats.tokens.generated, told.stats.tokens.forced) == (generated, forced)
    assert told.stats.requests.done == 1
    assert sum(told.distributions.ttft_s.counts) == 1


def test_each_request_ends_once() -> None:
    engine = TinyEngine("llama")
    engine.ask(PROMPT, 3)
    engine.finish()
    written = engine.requests[0].text
    engine.ask(PROMPT, 9, stop=written[1])
    engine.finish()
    gone = engine.ask(OTHER, 9)
    gone.request.cancel()
    engine.advance()
    leaving = engine.ask(OTHER, 9)
    engine.until(lambda: engine.phase(leaving) == "alone")
    leaving.request.cancel()
    engine.finish()
    assert stats(engine).requests == RequestCounts(length=1, done=1, cancelled=2)


def test_a_request_that_is_too_large_is_refused() -> None:
    engine = TinyEngine("llama", room=100_000)
    engine.ask(PROMPT[:5], 2)
    engine.finish()
    asked = engine.ask(PROMPT * 30, 2)
    engine.finish()
    assert isinstance(asked.received[0], Refused)
    assert stats(engine).requests == RequestCounts(length=1, refused=1)


@pytest.mark.parametrize("moment", ["waiting", "prefilled"])
def test_a_request_with_an_invalid_grammar_counts_as_refused_not_cancelled(moment: str) -> None:
    """The client reads the reason, and its connection ends the request."""
    engine = TinyEngine("llama")
    asked = engine.ask(PROMPT, 4)
    grammar: Future[Grammar] = Future()
    asked.request.grammar = grammar
    if moment == "prefilled":
        engine.advance(3)
    grammar.set_exception(RequestError("Format: it is none"))
    asked.request.cancel()
    engine.finish()
    assert stats(engine).requests == RequestCounts(refused=1)


def test_running_and_waiting_requests_are_listed_with_their_progress() -> None:
    engine = TinyEngine("llama", SlicePolicy(32, 0.1), parallel=1)
    first, second = engine.ask(PROMPT, 5), engine.ask(OTHER, 7)
    seen = []
    while not engine.scheduler.idle:
        engine.advance()
        told = stats(engine)
        assert told.requests.running + told.requests.queued == len(told.running)
        seen.append([(each.number, each.phase, each.prefilled, each.generated) for each in told.running])
    number, other = first.request.number, second.request.number
    assert seen[:4] == [
        [(number, "prefill", 0, 0), (other, "queued", 0, 0)],
        [(number, "prefill", 32, 0), (other, "queued", 0, 0)],
        [(number, "prefill", 64, 0), (other, "queued", 0, 0)],
        [(number, "prefill", 96, 0), (other, "queued", 0, 0)],
    ]
    assert [(number, "decode", 100, 4), (other, "queued", 0, 0)] in seen
    assert [(other, "decode", 80, 6)] in seen
    assert seen[-1] == []


def test_a_cache_that_was_replaced_is_counted_on() -> None:
    engine = TinyEngine("llama", budget=60_000)
    for start in range(4):
        engine.ask([(start + i) % VOCAB for i in range(0, 3 * 90, 3)], 3)
        engine.finish()
    before = stats(engine).cache
    assert before.evictions > 0
    assert before.evicted_bytes > 0
    engine.scheduler._cache_invalid = True
    engine.ask(PROMPT, 3)
    engine.finish()
    after = stats(engine).cache
    assert all(
        getattr(after, name) >= getattr(before, name) for name in ("evictions", "evicted_bytes", "restored_bytes")
    )


def test_slices_and_their_tokens_are_those_that_the_model_computed() -> None:
    engine = TinyEngine("llama", SlicePolicy(32, 0.1))
    engine.ask(PROMPT, 6)
    engine.finish()
    slices = stats(engine).slices
    prefills = [length for _, length in engine.forward.calls if length > 1]
    assert (slices.begin, slices.prefill, slices.prefill_tokens) == (1, len(prefills), sum(prefills))
    assert (slices.decode, slices.decode_rows) == (6, 6)
    prefill_s = sum(engine.forward.forward_s + engine.forward.token_s * length for length in prefills)
    assert slices.prefill_s == pytest.approx(prefill_s)
    assert slices.prefill_s + slices.decode_s == pytest.approx(engine.clock.now)


def test_the_time_between_two_tokens_is_that_between_two_steps_of_one_answer() -> None:
    engine = TinyEngine("llama")
    engine.forward.forward_s, engine.forward.token_s = 0.0, 0.02
    engine.ask(PROMPT, 9)
    engine.finish()
    gaps = collected(engine).distributions.gap_s
    assert sum(gaps.counts) == 8
    assert gaps.total == pytest.approx(8 * 0.02)


def test_every_request_has_one_queue_time_and_one_ttft_if_it_got_a_token() -> None:
    engine = TinyEngine("llama")
    engine.ask(PROMPT, 1)
    gone = engine.ask(OTHER, 5)
    engine.until(lambda: gone.session is not None)
    gone.request.cancel()
    engine.finish()
    engine.ask(PROMPT, 4)
    engine.finish()
    found = collected(engine).distributions
    assert sum(found.queue_s.counts) == 3
    assert sum(found.ttft_s.counts) == 2
    assert sum(found.prefill_rate.counts) == 2
    assert sum(found.decode_rate.counts) == 1, "of one token nothing can be said"


def test_text_is_shown_only_if_asked_for() -> None:
    engine = TinyEngine("llama")
    engine.ask(PROMPT, 5)
    engine.finish()
    silent, telling = (draw_cache(parts_of(engine, inspect_text=show))[0] for show in (False, True))
    assert silent.text is None
    assert telling.text == text_of(PROMPT)[:60]
