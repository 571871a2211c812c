"""Answers that follow a grammar: forced tokens cost no draw, and a slow compilation delays no other request.

`test_scheduler_mix` shows that each answer is that of the model alone under the same grammar.
"""

from concurrent.futures import Future

import pytest

from protocol import DoneReason
from runner.engine.answer_grammar import Grammar
from runner.engine.events import Failed
from runner.errors import RequestError
from runner.grammar.guide import Guide
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import KINDS
from tests.lib.breaking import breaking
from tests.lib.tiny_engine import ClientRequest, RequestSpec, TinyEngine, compiled_grammar

PROMPT = tuple(range(40))
LITERAL = 'start: /[0-9]/ "<=======>" /[0-9]/ "!"'
GREEDY = SamplingOptions()


def spec(
    grammar: str, max_tokens: int = 40, prompt: tuple[int, ...] = PROMPT, options: SamplingOptions = GREEDY
) -> RequestSpec:
    return RequestSpec(prompt, max_tokens, options, grammar=grammar)


class Later(Future[Grammar]):
    """A grammar whose compilation ends when the test says so."""

    def arrive(self, wanted: RequestSpec) -> None:
        grammar = compiled_grammar(wanted)
        assert grammar is not None
        self.set_result(grammar.result())


def ask_later(engine: TinyEngine, wanted: RequestSpec) -> tuple[ClientRequest, Later]:
    asked, later = ClientRequest(engine.kind, wanted), Later()
    asked.request.grammar = later
    engine.requests.append(asked)
    engine.scheduler.add(asked.request)
    return asked, later


@pytest.mark.parametrize("name", KINDS)
def test_forced_tokens_are_computed_in_one_forward(name: str) -> None:
    engine = TinyEngine(name)
    asked = engine.submit(spec(LITERAL))
    engine.finish()
    engine.check()
    assert len(asked.text) == 12
    *prompt, first, jump, last = engine.forward.calls
    # The first digit is drawn; it and what follows at once; the second digit, of which nobody knew that it is the end.
    assert sum(length for _, length in prompt) == len(PROMPT) - 1
    assert [first, jump, last] == [(1, 1), (1, 10), (1, 1)]


def test_a_forced_beginning_is_part_of_the_prefill() -> None:
    engine = TinyEngine("llama")
    asked = engine.submit(spec('start: "<<<<<<<<" /[0-9]/ ">"'))
    engine.advance()
    assert asked.text == "<<<<<<<<", "told before anything is computed"
    engine.finish()
    engine.check()
    assert engine.forward.calls == [(1, len(PROMPT) + 7), (1, 1)]


def test_a_long_jump_is_taken_in_parts() -> None:
    engine = TinyEngine("llama")
    asked = engine.submit(spec(f'start: /[0-9]/ "{"=" * 150}" /[0-9]/', 200))
    engine.finish()
    engine.check()
    assert len(asked.text) == 152
    assert max(length for _, length in engine.forward.calls[1:]) <= 65


def test_in_a_batch_forced_tokens_are_drawn() -> None:
    engine = TinyEngine("llama")
    first = engine.submit(spec("start: /[0-9]{60}/", 60))
    engine.until(lambda: len(first.tokens) > 5)
    asked = engine.submit(spec('start: /[0-9]/ /[0-9]/ /[0-9]/ /[0-9]/ "<=======>" /[0-9]/ "!"'))
    engine.until(lambda: engine.phase(asked) == "batch")
    at = len(engine.forward.calls)
    engine.until(lambda: asked.finished is not None)
    assert set(engine.forward.calls[at:]) <= {(2, 1), (1, 1)}
    engine.finish()
    engine.check()
    assert engine.forward.most_rows == 2


@pytest.mark.parametrize("most", [1, 11, 12])
def test_only_a_limit_that_cuts_the_answer_is_reported(most: int) -> None:
    engine = TinyEngine("llama")
    asked = engine.submit(spec(LITERAL, most))
    engine.finish()
    engine.check()
    assert asked.finished is not None
    assert asked.finished.metrics.eval_count == min(most, 12)
    assert asked.finished.reason is (DoneReason.LENGTH if most < 12 else DoneReason.STOP)


def test_a_stop_string_in_forced_text_ends_the_answer() -> None:
    engine = TinyEngine("llama")
    asked = engine.submit(spec(LITERAL)._replace(stop="==>"))
    engine.finish()
    engine.check()
    assert asked.text == f"{asked.text[0]}<====="
    again = engine.submit(spec(LITERAL)._replace(stop="==>"))
    engine.finish()
    again.check_answer()
    assert again.cached == len(PROMPT) - 1


def test_a_slow_grammar_delays_no_other_request() -> None:
    engine = TinyEngine("llama")
    asked, later = ask_later(engine, spec(LITERAL))
    engine.until(lambda: engine.phase(asked) == "compiling")
    assert engine.scheduler.idle, "nothing to do until it arrives"
    assert asked.text == ""
    other = engine.ask(PROMPT, 5)
    engine.until(lambda: other.finished is not None)
    assert engine.phase(asked) == "compiling"
    later.arrive(asked.spec)
    assert not engine.scheduler.idle
    engine.finish()
    engine.check()


def test_an_invalid_grammar_ends_its_request_and_keeps_the_prefill() -> None:
    engine = TinyEngine("llama")
    asked, later = ask_later(engine, spec(LITERAL))
    engine.until(lambda: engine.phase(asked) == "compiling")
    later.set_exception(RequestError("Format: no such thing"))
    engine.finish()
    assert not asked.failed, "the client reads it in the refusal"
    assert asked.text == ""
    engine.check_cache()
    again = engine.ask(PROMPT, 5)
    engine.finish()
    again.check_answer()
    assert again.cached == len(PROMPT) - 1


def test_a_client_that_leaves_while_its_grammar_is_compiled_takes_its_place_with_it() -> None:
    engine = TinyEngine("llama", parallel=1)
    asked, later = ask_later(engine, spec(LITERAL))
    engine.until(lambda: engine.phase(asked) == "compiling")
    other = engine.ask(PROMPT, 3)
    assert engine.scheduler.idle, "the only place is taken"
    asked.request.cancel()
    assert later.cancelled(), "nobody else waits for it"
    engine.finish()
    assert other.finished
    assert asked.text == ""
    engine.check_cache()


def test_a_mask_that_raises_returns_all_to_prefill_and_loses_nothing() -> None:
    wishes = [spec('start: (/[0-9]/ "=>"){9}', 40, tuple(range(row, 30))) for row in range(3)]
    for at in (5, 18):
        engine = TinyEngine("llama")
        for each in wishes:
            engine.submit(each)
        with breaking(Guide, "mask", at):
            engine.finish()
        finished = [asked for asked in engine.requests if asked.finished]
        assert len(finished) >= len(wishes) - 1, "at most the one that computes alone may fail by it"
        for asked in finished:
            asked.check_answer()
        engine.check_cache()


@pytest.mark.parametrize("name", ["llama", "llama4"])
def test_a_late_mask_delays_only_its_own_answer(name: str) -> None:
    engine = TinyEngine(name)
    others = [engine.ask(range(row, 30), 20) for row in range(2)]
    engine.until(lambda: all(engine.phase(other) == "batch" or engine.running() < 2 for other in others))
    late = engine.submit(spec('start: (/[0-9]/ "=>"){9}', 40, tuple(range(5, 30))))
    engine.until(lambda: len(late.tokens) > 1)
    engine.late = lambda: 10**6
    engine.until(lambda: all(other.finished for other in others))
    assert late.finished is None
    engine.until(lambda: engine.scheduler.idle)
    assert engine.scheduler.awaits_mask, "there is nothing to do but to wait for the mask"
    engine.late = lambda: 0
    late.request.cancel()
    engine.finish()
    engine.check()


def test_an_answer_with_a_late_mask_is_split_off_and_the_batch_goes_on() -> None:
    engine = TinyEngine("llama")
    for row in range(2):
        engine.ask(range(row, 30), 30)
    late = engine.submit(spec('start: (/[0-9]/ "=>"){9}', 40, tuple(range(5, 30))))
    engine.until(lambda: engine.phase(late) == "batch" and engine.forward.most_rows == 3)
    at, engine.late = len(engine.forward.calls), lambda: 2
    engine.until(lambda: engine.phase(late) == "alone")
    engine.late = lambda: 0
    engine.finish()
    engine.check()
    assert engine.forward.calls[at:].count((2, 1)) > 10, "the others stay together"
    assert all(length == 1 for rows, length in engine.forward.calls[at:] if rows > 1)
    assert sum(rows * length for rows, length in engine.forward.calls[at:]) < 120, "nobody begins again"


def test_a_grammar_that_fails_in_a_batch_ends_its_answer_only() -> None:
    engine = TinyEngine("llama")
    others = [engine.ask(range(row, 30), 30) for row in range(2)]
    failing = engine.submit(spec('start: /[0-9]{20}/ "é"', 40, tuple(range(5, 30))))
    engine.until(lambda: engine.phase(failing) == "batch" and engine.forward.most_rows == 3)
    at = len(engine.forward.calls)
    engine.finish()
    (*_, last) = failing.received
    assert isinstance(last, Failed)
    for other in others:
        other.check_answer()
    engine.check_cache()
    assert {length for _, length in engine.forward.calls[at:]} == {1}, "no request returns to prefill"
    assert engine.forward.calls[at:].count((2, 1)) > 5, "the others stay together"
