"""One request alone computes what a plain loop does, slice by slice, over a cache of one sequence."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from protocol import DoneReason
from runner.engine.events import Text
from runner.engine.policy import SlicePolicy
from scripts.tools.models.tiny import KINDS, VOCAB
from tests.lib.tiny_engine import TinyEngine, text_of

PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(50)]


def make_engine(name: str = "llama", chunk: int = 2048, cache: str = "single") -> TinyEngine:
    return TinyEngine(name, SlicePolicy(chunk, 0.1), cache=cache)


def noting(evaluate: Callable[[list[mx.array]], None], lengths: list[int]) -> Callable[[list[mx.array]], None]:
    """Returns the function; each call adds the number of its arrays."""

    def noted(arrays: list[mx.array]) -> None:
        lengths.append(len(arrays))
        evaluate(arrays)

    return noted


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_answers_as_a_plain_loop(name: str, chunk: int) -> None:
    engine = make_engine(name, chunk)
    first = engine.ask(PROMPT)
    engine.finish()
    longer = engine.ask([*PROMPT, *first.tokens, 5, 6, 7])
    engine.finish()
    engine.check()
    assert longer.cached >= len(PROMPT) + 11


def test_prefill_goes_in_chunks_and_the_last_token_is_not_fed_back() -> None:
    engine = make_engine(chunk=20)
    engine.ask(PROMPT, 3)
    engine.finish()
    assert engine.forward.calls == [(1, 20), (1, 20), (1, 9), (1, 1), (1, 1), (1, 1)]


def test_the_next_forward_is_started_before_a_token_is_read_and_every_chunk_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(chunk=20)
    started, computed = list[int](), list[int]()
    for name, lengths in (("async_eval", started), ("eval", computed)):
        monkeypatch.setattr(mx, name, noting(getattr(mx, name), lengths))
    asked, seen = engine.ask(PROMPT, 5), []
    while not engine.idle:
        said = len(asked.tokens)
        engine.advance()
        if len(asked.tokens) > said:
            seen.append((len(asked.tokens), len(engine.forward.calls) - 3, len(started)))
    # The first token comes with the first step, each other once the forward after it is on its way, the last at once.
    assert seen == [(1, 1, 1), (2, 3, 3), (3, 4, 4), (4, 5, 5), (5, 5, 5)]
    assert computed == [4] * 4, "keys and values of two layers after each chunk and at the end: no step waits for them"


def test_buffers_that_the_layers_outgrew_are_given_back_while_a_long_answer_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clears = list[int]()
    monkeypatch.setattr(mx, "clear_cache", lambda: clears.append(1))
    engine = make_engine(cache="none")
    engine.ask([1], 600)
    engine.finish()
    assert len(clears) == 2


def test_an_answer_ends_by_its_first_end_and_the_cache_keeps_what_was_computed() -> None:
    plain = make_engine()
    answer = plain.ask(PROMPT)
    plain.finish()
    at = next(at for at in range(4, 12) if answer.tokens[at] not in answer.tokens[:at])
    eos = frozenset({answer.tokens[at]})
    for most, stop, reason, count in (
        (12, "", DoneReason.STOP, at),  # the end-of-sequence token is neither sent nor counted
        (at, "", DoneReason.LENGTH, at),  # nor looked at beyond the limit
        (12, text_of(answer.tokens[1:3]), DoneReason.STOP, 3),
    ):
        engine = TinyEngine("llama", cache="single", eos=eos)
        asked = engine.ask(PROMPT, most, stop)
        engine.finish()
        engine.check()
        assert asked.finished is not None
        assert (asked.finished.reason, asked.finished.metrics.eval_count) == (reason, count)
        assert min(asked.finished.metrics.prompt_eval_duration, asked.finished.metrics.eval_duration) > 0
    again = engine.ask([*PROMPT, *answer.tokens[:3], 1])
    engine.finish()
    assert again.cached == len(PROMPT) + 3


def test_metered_lines_count_up_and_others_carry_nothing() -> None:
    for metered, expected in ((True, [1, 2, 3, 4]), (False, [None] * 4)):
        engine = make_engine()
        asked = engine.ask(PROMPT, 4, metered=metered)
        engine.finish()
        counts = [event.metrics and event.metrics.eval_count for event in asked.received if isinstance(event, Text)]
        assert counts == expected
