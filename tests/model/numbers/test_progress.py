"""The progress of prompts in the log and on a terminal, on a made-up clock."""

import re

import pytest

from runner.engine.policy import SlicePolicy
from runner.numbers.journal import PromptProgress
from scripts.tools.models.tiny import VOCAB
from tests.lib.tiny_engine import Clock, TinyEngine

PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(200)]


def test_progress_is_reported_once_a_second_with_rate_and_time_left_of_computed_tokens() -> None:
    clock, shown = Clock(), list[str]()
    progress = PromptProgress(7, 1000, 400, clock, lambda text: not shown.append(text))  # type: ignore[func-returns-value]
    steps: list[int] = []
    for step in range(1, 45):
        clock.now = 0.1 * step
        progress.add(10)
        steps += [step] * (len(shown) - len(steps))
    assert steps == [10, 20, 30, 40]
    assert progress.reported
    assert [re.findall(r"\d+", line) for line in shown] == [
        ["7", f"{40 + at}", "100", f"{6 - at // 10}"] for at in steps
    ]


def make_engine(shown: list[str], *, terminal: bool) -> TinyEngine:
    """Returns an engine in which a prompt of 200 tokens takes ten slices of 0.3 s."""

    def show(text: str) -> bool:
        shown.append(text)
        return terminal

    engine = TinyEngine("llama", SlicePolicy(20, 0.1), show=show)
    engine.forward.forward_s, engine.forward.token_s = 0.0, 0.015
    return engine


def test_a_long_prompt_gets_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "runner.numbers")
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
    caplog.set_level("INFO", "runner.numbers")
    shown: list[str] = []
    engine = make_engine(shown, terminal=True)
    engine.ask(PROMPT, 2)
    engine.finish()
    assert [" 40 % " in text for text in shown] == [True, False, False]
    assert shown[-1] == ""
    assert "prefill" not in [record.message for record in caplog.records]


def test_one_line_tells_all_of_a_request_that_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "runner.numbers")
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
