"""What the engine counts is what happened, and counting costs it next to nothing."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from time import perf_counter_ns

import pytest

from protocol.stats import Stats
from runner.cache.interface import Miss
from runner.engine.events import Failed, Finished, Refused
from runner.engine.memory.budget import MemoryBudget
from runner.engine.observe.counters import Counters, Histogram
from runner.engine.policy import SlicePolicy
from runner.engine.report import About, Report, preview
from runner.errors import RequestError
from runner.grammar import Grammar
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import VOCAB
from tests.lib.company import CONTEXT, Company, NoMeter, Wish, text_of, tokenizer

PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(100)]
OTHER = [(5 * i * i + i + 2) % VOCAB for i in range(80)]


def survey(company: Company, *, inspect_text: bool = False) -> Report:
    about = About("1.2.3", "tiny:latest", "llama", "cpu", CONTEXT, "trie")
    memory = MemoryBudget(NoMeter(), 1 << 30, 2048)
    return Report(about, company.running, memory, tokenizer() if inspect_text else None)


def stats(company: Company) -> Stats:
    return survey(company).publish().stats


# --- distributions


def test_a_value_counts_below_the_first_bound_that_it_does_not_exceed() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1.0, 1.5, 2.0, 5.0, 5.5, 100.0):
        histogram.add(value)
    distribution = histogram.frozen()
    assert distribution.bounds == (1.0, 2.0, 5.0)
    assert distribution.counts == (2, 2, 1, 2)
    assert distribution.total == 115.5


def test_what_was_frozen_stays_as_it_was() -> None:
    histogram = Histogram((1,))
    before = histogram.frozen()
    histogram.add(0)
    assert (before.counts, histogram.frozen().counts) == ((0, 0), (1, 0))


# --- requests and their tokens


def test_tokens_of_prompts_are_counted_by_where_they_came_from() -> None:
    company = Company("llama")
    first = company.ask(PROMPT, 6)
    company.finish()
    again = company.ask([*PROMPT[:60], *OTHER[:20]], 4)
    company.finish()
    tokens = stats(company).tokens
    assert (first.cached, again.cached) == (0, 60)
    assert (tokens.prompt, tokens.matched, tokens.cached, tokens.recomputed) == (180, 60, 60, 120)
    assert (tokens.generated, tokens.forced) == (10, 0)


def test_the_same_prompt_again_is_known_but_for_its_last_token() -> None:
    company = Company("llama")
    for _ in range(2):
        company.ask(PROMPT, 3)
        company.finish()
    tokens = stats(company).tokens
    assert (tokens.matched, tokens.cached, tokens.recomputed) == (100, 99, 101)


def test_tokens_of_an_answer_count_while_it_is_written() -> None:
    company = Company("llama")
    asked = company.ask(PROMPT, 8)
    seen = []
    while not company.running.idle:
        company.advance()
        seen.append(stats(company).tokens.generated)
        assert seen[-1] == len(asked.tokens)
    assert seen[-1] == 8
    assert all(before <= after for before, after in pairwise(seen))


@pytest.mark.parametrize(
    ("grammar", "generated", "forced"),
    [
        ('start: /[0-9]/ "<=======>" /[0-9]/ "!"', 12, 10),
        ('start: "<<<<<<<<" /[0-9]/ ">"', 10, 9),
        ('start: "<<<<>>>>"', 8, 8),
        ("start: /[0-9]{5}/", 5, 0),
    ],
)
def test_what_a_grammar_leaves_no_choice_about_is_forced(grammar: str, generated: int, forced: int) -> None:
    company = Company("llama")
    company.admit(Wish(tuple(PROMPT), 40, SamplingOptions(), grammar=grammar))
    company.finish()
    told = survey(company).publish()
    assert (told.stats.tokens.generated, told.stats.tokens.forced) == (generated, forced)
    assert told.stats.requests.done == 1
    assert sum(told.distributions.ttft_s.counts) == 1


def test_each_request_ends_once() -> None:
    company = Company("llama")
    company.ask(PROMPT, 3)
    company.finish()
    written = company.everyone[0].text
    company.ask(PROMPT, 9, stop=written[1])
    company.finish()
    gone = company.ask(OTHER, 9)
    gone.request.cancel()
    company.advance()
    leaving = company.ask(OTHER, 9)
    company.until(lambda: company.phase(leaving) == "alone")
    leaving.request.cancel()
    company.finish()
    requests = stats(company).requests
    assert (requests.length, requests.done, requests.cancelled, requests.failed, requests.refused) == (1, 1, 2, 0, 0)
    assert (requests.running, requests.queued) == (0, 0)


def test_a_request_that_breaks_has_failed_and_not_ended_otherwise() -> None:
    company = Company("llama")
    company.forward.breaks = lambda rows, length: length == 1
    asked = company.ask(PROMPT, 9)
    company.finish()
    assert isinstance(asked.told[-1], Failed)
    requests = stats(company).requests
    assert (requests.failed, requests.done, requests.length, requests.cancelled) == (1, 0, 0, 0)


def test_a_request_without_a_session_has_failed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    company = Company("llama")

    def broken(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(company.running.cache, "begin", broken)
    asked = company.ask(PROMPT)
    company.finish()
    assert isinstance(asked.told[-1], Failed)
    requests = stats(company).requests
    assert (requests.failed, requests.queued, requests.running) == (1, 0, 0)


def test_a_request_that_is_too_large_is_refused() -> None:
    company = Company("llama", room=100_000)
    company.ask(PROMPT[:5], 2)
    company.finish()
    asked = company.ask(PROMPT * 30, 2)
    company.finish()
    assert isinstance(asked.told[0], Refused)
    requests = stats(company).requests
    assert (requests.refused, requests.length, requests.queued) == (1, 1, 0)


@pytest.mark.parametrize("moment", ["waiting", "prefilled"])
def test_who_asked_for_a_grammar_that_is_none_was_refused_and_has_not_left(moment: str) -> None:
    """The client reads why, and its connection ends the request."""
    company = Company("llama")
    asked = company.ask(PROMPT, 4)
    grammar: Future[Grammar] = Future()
    asked.request.grammar = grammar
    if moment == "prefilled":
        company.advance(3)
    grammar.set_exception(RequestError("Format: it is none"))
    asked.request.cancel()
    company.finish()
    requests = stats(company).requests
    assert (requests.refused, requests.cancelled, requests.failed) == (1, 0, 0)


def test_who_runs_and_who_waits_is_told_with_how_far_they_are() -> None:
    company = Company("llama", SlicePolicy(32, 0.1), parallel=1)
    first, second = company.ask(PROMPT, 5), company.ask(OTHER, 7)
    seen = []
    while not company.running.idle:
        company.advance()
        told = stats(company)
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


def test_a_running_request_says_what_it_asked_for() -> None:
    company = Company("llama")
    company.ask(PROMPT, 5)
    company.finish()
    company.ask([*PROMPT[:40], *OTHER], 7)
    company.until(lambda: bool(stats(company).running) and stats(company).running[0].phase == "decode")
    (running,) = stats(company).running
    assert (running.prompt, running.cached, running.max_tokens) == (120, 40, 7)
    assert running.age_s > 0


def test_a_prompt_whose_grammar_is_not_known_yet_is_told_apart() -> None:
    company = Company("llama")
    asked = company.ask(PROMPT, 4)
    asked.request.grammar = Future()
    company.advance(5)
    (running,) = stats(company).running
    assert (running.phase, running.prefilled, running.generated) == ("grammar", 99, 0)
    asked.request.cancel()
    company.advance()
    assert stats(company).requests.cancelled == 1


# --- misses


def test_misses_are_counted_by_their_reason() -> None:
    company = Company("mamba2")
    for prompt in (PROMPT, OTHER, [*PROMPT[:40], *OTHER[:10]]):
        company.ask(prompt, 3)
        company.finish()
    sessions = [asked.session for asked in company.everyone]
    told = [session.miss for session in sessions if session is not None]
    assert told[:2] == [Miss.EMPTY, Miss.NO_COMMON_PREFIX]
    assert told[2] is Miss.NON_TRIMMABLE
    assert stats(company).cache.misses == {"empty": 1, "no_common_prefix": 1, "non_trimmable_divergence": 1}


def test_who_finds_all_that_is_there_misses_nothing() -> None:
    company = Company("llama")
    for _ in range(2):
        company.ask(PROMPT, 3)
        company.finish()
    assert stats(company).cache.misses == {"empty": 1}


def test_a_cache_that_was_replaced_is_counted_on() -> None:
    company = Company("llama", budget=60_000)
    for start in range(4):
        company.ask([(start + i) % VOCAB for i in range(0, 3 * 90, 3)], 3)
        company.finish()
    before = stats(company).cache
    assert before.evictions > 0
    company.running._spoiled = True
    company.ask(PROMPT, 3)
    company.finish()
    after = stats(company).cache
    assert after.evictions >= before.evictions
    assert after.evicted_bytes >= before.evicted_bytes > 0
    assert after.restored_bytes >= before.restored_bytes


# --- slices and times


def test_slices_and_their_tokens_are_those_that_the_model_computed() -> None:
    company = Company("llama", SlicePolicy(32, 0.1))
    company.ask(PROMPT, 6)
    company.finish()
    slices = stats(company).slices
    prefills = [length for _, length in company.forward.calls if length > 1]
    assert (slices.begin, slices.prefill, slices.prefill_tokens) == (1, len(prefills), sum(prefills))
    assert (slices.decode, slices.decode_rows) == (6, 6)
    prefill_s = sum(company.forward.forward_s + company.forward.token_s * length for length in prefills)
    assert slices.prefill_s == pytest.approx(prefill_s)
    assert slices.prefill_s + slices.decode_s == pytest.approx(company.clock.now)


def test_a_step_of_several_counts_each_of_them() -> None:
    company = Company("llama")
    for prompt in (PROMPT, OTHER):
        company.ask(prompt, 8)
    company.finish()
    assert company.forward.most_rows == 2
    slices = stats(company).slices
    assert slices.decode_rows == 16 > slices.decode


def test_the_time_between_two_tokens_is_that_between_two_steps_of_one_answer() -> None:
    company = Company("llama")
    company.forward.forward_s, company.forward.token_s = 0.0, 0.02
    company.ask(PROMPT, 9)
    company.finish()
    gaps = survey(company).publish().distributions.gap_s
    assert sum(gaps.counts) == 8
    assert gaps.total == pytest.approx(8 * 0.02)


def test_every_request_has_one_queue_time_and_whoever_got_a_token_one_ttft() -> None:
    company = Company("llama")
    company.ask(PROMPT, 1)
    gone = company.ask(OTHER, 5)
    company.until(lambda: gone.session is not None)
    gone.request.cancel()
    company.finish()
    company.ask(PROMPT, 4)
    company.finish()
    found = survey(company).publish().distributions
    assert sum(found.queue_s.counts) == 3
    assert sum(found.ttft_s.counts) == 2
    assert sum(found.prefill_rate.counts) == 2
    assert sum(found.decode_rate.counts) == 1, "of one token nothing can be said"


def test_the_ttft_of_the_last_answer_is_that_of_the_request_that_has_it() -> None:
    company = Company("llama")
    assert stats(company).ttft_s is None
    asked = company.ask(PROMPT, 4)
    company.until(lambda: company.phase(asked) == "prefilling")
    assert [each.ttft_s for each in stats(company).running] == [None]
    company.until(lambda: bool(asked.tokens))
    (running,) = stats(company).running
    assert running.ttft_s == stats(company).ttft_s
    assert running.ttft_s is not None
    assert 0 < running.ttft_s <= running.age_s + 0.001
    company.finish()
    assert stats(company).ttft_s == running.ttft_s


@pytest.mark.parametrize("outcome", ["finished", "cancelled"])
def test_nothing_is_remembered_of_who_is_gone(outcome: str) -> None:
    company = Company("llama")
    asked = company.ask(PROMPT, 9)
    company.until(lambda: company.phase(asked) == "alone")
    if outcome == "cancelled":
        asked.request.cancel()
    company.finish()
    counters = company.running.journal.counters
    assert not counters.running
    assert not company.running.journal._prefills._prompts
    assert isinstance(asked.told[-1], Finished) == (outcome == "finished")


# --- what it costs


class _Stepped:
    """Stands in for a generation: that it is one is all that counts."""


def rows(count: int) -> Iterator[_Stepped]:
    return (_Stepped() for _ in range(count))


def test_a_token_makes_the_counters_no_larger() -> None:
    """Only the counts of a fixed number of buckets, and one time for each answer that runs."""
    counters = Counters()
    stepped: Callable[..., None] = counters.stepped
    answers = list(rows(4))
    counters._stepped_s = dict.fromkeys(answers, 0.0)  # type: ignore[arg-type]  # stand-ins
    for step in range(100):
        stepped(answers, 0.01 * step)
    assert len(counters._stepped_s) == 4
    gaps = counters.distributions().gap_s
    assert (len(gaps.counts), sum(gaps.counts)) == (len(gaps.bounds) + 1, 400)
    assert counters.slices().decode_rows == 400


def test_nobody_looks_while_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    company = Company("llama")

    def looked(*_: object) -> None:
        raise AssertionError("a snapshot was made")

    for name in ("requests", "tokens", "slices", "cache", "distributions"):
        monkeypatch.setattr(Counters, name, looked)
    company.ask(PROMPT, 5)
    company.finish()
    assert company.everyone[0].finished is not None


# --- what it tells


def test_the_survey_says_whose_numbers_they_are() -> None:
    told = stats(Company("llama"))
    assert (told.version, told.model, told.architecture, told.device) == ("1.2.3", "tiny:latest", "llama", "cpu")
    assert (told.context_length, told.cache_kind) == (CONTEXT, "trie")
    assert told.memory.budget_bytes == 1 << 30
    assert 0 <= told.uptime_s < perf_counter_ns() / 1e9


def test_the_cache_of_a_company_is_its_tries() -> None:
    company = Company("llama", budget=1 << 20)
    company.ask(PROMPT, 5)
    company.finish()
    cache = stats(company).cache
    assert (cache.budget_bytes, cache.nodes) == (1 << 20, 1)
    assert cache.held_bytes == cache.live_bytes == company.trie.nbytes > 0


def test_text_is_shown_only_where_it_was_asked_for() -> None:
    company = Company("llama")
    company.ask(PROMPT, 5)
    company.finish()
    (silent,), (telling,) = survey(company).nodes(), survey(company, inspect_text=True).nodes()
    assert silent.text is None
    assert telling.text == text_of(PROMPT)[:60]


def test_a_preview_is_cut_and_may_begin_within_a_character() -> None:
    assert preview(tokenizer(), PROMPT * 10) == text_of(PROMPT)[:60]
    assert preview(tokenizer(), []) == ""
