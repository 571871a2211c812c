"""The progress of prompts in the log and on a terminal, on a made-up clock."""

from collections.abc import Callable

import pytest

from runner.engine.journal import Journal, ProgressReporter, PromptProgress
from runner.engine.policy import SlicePolicy
from scripts.tools.models.tiny import VOCAB
from tests.lib.tiny_engine import Clock, TinyEngine

PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(200)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def prefills(clock: Clock) -> ProgressReporter:
    return ProgressReporter(clock)


def passing(clock: Clock, prefills: ProgressReporter) -> Callable[[float, int], PromptProgress | None]:
    """Sets the clock, and the number of tokens of prompt 1 that are computed by then."""

    def passed(at_s: float, done: int) -> PromptProgress | None:
        clock.now = at_s
        return prefills.report(1, done)

    return passed


def test_progress_is_reported_once_a_second(clock: Clock, prefills: ProgressReporter) -> None:
    passed = passing(clock, prefills)
    prefills.begin(1, 1000, 0)
    said = [passed(0.1 * step, 5 * step) is not None for step in range(1, 45)]
    assert [step for step, was_said in enumerate(said, 1) if was_said] == [10, 20, 30, 40]
    assert prefills.end(1)


def test_rate_and_time_left_are_of_what_was_computed(clock: Clock, prefills: ProgressReporter) -> None:
    passed = passing(clock, prefills)
    prefills.begin(1, 1000, 400)
    reading = passed(2.0, 600)
    assert reading == PromptProgress(request=1, done=600, total=1000, tokens_per_s=100.0, seconds_left=4.0)
    assert reading.percent == 60


def test_two_prompts_have_clocks_of_their_own(clock: Clock, prefills: ProgressReporter) -> None:
    prefills.begin(1, 1000, 0)
    clock.now = 0.6
    prefills.begin(2, 500, 0)
    clock.now = 1.1
    assert prefills.report(1, 300) is not None
    assert prefills.report(2, 100) is None
    clock.now = 1.7
    assert prefills.report(1, 400) is None
    second = prefills.report(2, 110)
    assert second is not None
    assert second.request == 2
    assert second.tokens_per_s == pytest.approx(100.0)


def make_engine(shown: list[str], *, terminal: bool) -> TinyEngine:
    """Returns an engine in which a prompt of 200 tokens takes ten slices of 0.3 s."""
    engine = TinyEngine("llama", SlicePolicy(20, 0.1))
    engine.forward.forward_s, engine.forward.token_s = 0.0, 0.015

    def show(text: str) -> bool:
        shown.append(text)
        return terminal

    engine.scheduler.journal = Journal(ProgressReporter(engine.clock), show)
    return engine


def test_a_long_prompt_gets_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "runner.engine")
    engine = make_engine([], terminal=False)
    asked = engine.ask(PROMPT, 2)
    engine.finish()
    told = [record.__dict__["attributes"] for record in caplog.records if record.message == "prefill"]
    assert [(line["request"], line["done"], line["percent"]) for line in told] == [
        (asked.request.number, 80, 40),
        (asked.request.number, 160, 80),
    ]
    assert all(line["total"] == 200 for line in told)
    assert [line["tokens_per_s"] for line in told] == [pytest.approx(66.7, abs=0.05)] * 2
    assert told[0]["seconds_left"] == pytest.approx(1.8)


def test_on_a_terminal_a_prompt_gets_a_bar_that_disappears(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "runner.engine")
    shown: list[str] = []
    engine = make_engine(shown, terminal=True)
    engine.ask(PROMPT, 2)
    engine.finish()
    assert [" 40 % " in text for text in shown] == [True, False, False]
    assert shown[-1] == ""
    assert "prefill" not in [record.message for record in caplog.records]


def test_one_line_tells_all_of_a_request_that_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "runner.engine")
    engine = TinyEngine("mamba2")
    for prompt in (PROMPT[:60], [*PROMPT[:30], 1, 2, 3]):
        engine.ask(prompt, 5)
        engine.finish()
    first, second = (record.__dict__["attributes"] for record in caplog.records if record.message == "completion")
    assert (first["outcome"], first["total"], first["cached"], first["left"], first["miss"]) == (
        *("length", 60, 0, 60),
        "empty",
    )
    assert (second["total"], second["matched"], second["cached"], second["miss"]) == (
        *(33, 30, 0),
        "non_trimmable_divergence",
    )
    assert (second["generated"], second["forced"], second["evicted_bytes"]) == (5, 0, 0)
    assert second["ttft_ms"] >= second["waited_ms"] >= 0
    assert second["tokens_per_s"] > 0
    assert second["prefill_tokens_per_s"] > 0
