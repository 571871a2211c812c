"""Answers that decode in one batch or alone: rows join and leave, and no answer changes."""

import logging
from unittest.mock import patch

import pytest

from runner.engine.batches import LONE_STEPS
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import KINDS, words
from tests.lib.tiny_engine import BATCHABLE, RequestSpec, TinyEngine

requests = pytest.mark.parametrize("name", KINDS)
batchable = pytest.mark.parametrize("name", BATCHABLE)

SAMPLING = [
    SamplingOptions(),
    SamplingOptions(temperature=0.8, seed=1),
    SamplingOptions(temperature=1.2, seed=2, top_k=10, repeat_penalty=1.3, repeat_last_n=8),
    SamplingOptions(logprobs=True, top_logprobs=3),
    SamplingOptions(temperature=0.9, seed=4, top_p=0.7, logprobs=True),
    SamplingOptions(presence_penalty=0.6, frequency_penalty=0.2, repeat_last_n=-1),
    SamplingOptions(temperature=0.7, seed=6, min_p=0.2, top_k=30),
    SamplingOptions(temperature=1.0, seed=7, top_k=10, logprobs=True, top_logprobs=2),
]


@requests
def test_eight_answers_of_every_sort_are_what_each_is_alone(name: str) -> None:
    engine = TinyEngine(name)
    for number, options in enumerate(SAMPLING):
        engine.submit(RequestSpec(tuple(words(20 + 5 * number, 3 * number + 1)), 15 + number, options))
    engine.finish()
    engine.check()
    assert engine.forward.most_rows == (8 if name in BATCHABLE else 1)


@batchable
def test_as_many_decode_in_one_forward_as_are_there(name: str) -> None:
    engine = TinyEngine(name)
    asked = [engine.ask(words(20 + 9 * number, number), 16 + 8 * number) for number in range(4)]
    engine.until(lambda: all(engine.phase(each) == "batch" for each in asked))
    engine.forward.calls.clear()
    engine.finish()
    engine.check()
    rows = [count for count, _ in engine.forward.calls]
    assert rows == sorted(rows, reverse=True)
    assert set(rows) == {1, 2, 3, 4}
    assert len(rows) <= 40  # a step is one forward, whoever takes part in it


def test_answers_to_short_prompts_that_come_together_begin_together() -> None:
    engine = TinyEngine("llama")
    for number in range(4):
        engine.ask(words(20 + number, number), 8)
    engine.finish()
    engine.check()
    assert [rows for rows, length in engine.forward.calls if length == 1] == [4] * 8


def test_an_answer_begins_beside_those_that_run_unless_it_is_one_token_or_its_prompt_is() -> None:
    engine = TinyEngine("llama")
    first = engine.ask(words(30, 7), 20)
    engine.until(lambda: len(first.tokens) > 2)
    engine.ask(words(31, 8), 8)
    engine.ask(words(1, 9), 8)
    engine.ask(words(31, 10), 1)
    engine.finish()
    engine.check()
    last_prompt = max(at for at, (_, length) in enumerate(engine.forward.calls) if length > 1)
    assert [rows for rows, _ in engine.forward.calls[last_prompt + 1 :]][:11] == [1, 1, *[3] * 8, 2]


@batchable
@pytest.mark.parametrize("tokens", [5, 300])
def test_a_batch_makes_room_layer_by_layer_before_others_join(name: str, tokens: int) -> None:
    """Nobody waits until all rows are copied: while the prompt of the newcomer is read, or it decodes alone."""
    engine = TinyEngine(name)
    asked = [engine.ask(words(20, number), 80) for number in range(2)]
    engine.until(lambda: all(engine.phase(each) == "batch" for each in asked))
    with patch("runner.cache.layers.batched._PIECE_BYTES", 1), patch("runner.cache.layers.batched._PIECES", 1 << 30):
        engine.ask(words(tokens, 7), 20)
        engine.finish()
    engine.check()
    last_prompt = max(at for at, (_, length) in enumerate(engine.forward.calls) if length > 1)
    rows = [rows for rows, _ in engine.forward.calls[last_prompt + 1 :]]
    waits = tokens == 5 and name not in ("mamba2", "qwen3_next")  # these two have at most one layer of keys and values
    assert rows[0] == (1 if waits else 3)
    assert 3 in rows[:8]


@pytest.mark.parametrize(("copied_tokens", "tokens", "rows"), [(4, 4, 1), (4, 30, 3), (64, 4, 3)])
def test_the_longer_a_row_the_later_it_joins_others(copied_tokens: int, tokens: int, rows: int) -> None:
    """Joining copies the layers of a row, which does not pay for long prompts with very short answers."""
    engine = TinyEngine("llama")
    engine.scheduler.batches.lone_steps = LONE_STEPS
    with patch("runner.engine.batches._COPIED_TOKENS", copied_tokens):
        for number in range(3):
            engine.ask(words(20, number), tokens)
        engine.finish()
    assert engine.forward.most_rows == rows
    engine.check()


def test_a_model_whose_answers_must_not_share_a_forward_takes_turns(caplog: pytest.LogCaptureFixture) -> None:
    engine = TinyEngine("llama", unbatchable="its rows disturb each other")
    with caplog.at_level(logging.INFO):
        engine.ask(words(30), 10)
        engine.finish()
        assert "in turns" not in caplog.text, "nobody wanted to know yet"
        for number in range(4):
            engine.ask(words(30, number), 30)
        engine.finish()
    engine.check()
    assert engine.forward.most_rows == 1
    assert caplog.text.count("answers are computed in turns, not together") == 1
