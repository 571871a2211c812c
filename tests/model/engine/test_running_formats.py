"""Answers that follow a grammar: what is forced costs no draw, what is compiled late holds nobody up.

`test_running_mix` shows that each answer is the one that the model gives alone under the same grammar.
"""

from concurrent.futures import Future

import mlx.core as mx
import pytest
from msgspec.structs import replace

from protocol import DoneReason
from runner.engine.events import Failed, Text
from runner.errors import RequestError
from runner.grammar import Grammar, Guide
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import KINDS
from tests.lib.breaking import breaking
from tests.lib.company import Asked, Company, Wish, alone, compiled, text_of

PROMPT = tuple(range(40))
LITERAL = 'start: /[0-9]/ "<=======>" /[0-9]/ "!"'
GREEDY = SamplingOptions()


def wish(
    grammar: str, max_tokens: int = 40, prompt: tuple[int, ...] = PROMPT, options: SamplingOptions = GREEDY
) -> Wish:
    return Wish(prompt, max_tokens, options, grammar=grammar)


class Later(Future[Grammar]):
    """A grammar that is compiled when a test says so."""

    def arrive(self, wanted: Wish) -> None:
        grammar = compiled(wanted)
        assert grammar is not None
        self.set_result(grammar.result())


def ask_later(company: Company, wanted: Wish) -> tuple[Asked, Later]:
    asked, later = Asked(company.kind, wanted), Later()
    asked.request.grammar = later
    company.everyone.append(asked)
    company.running.add(asked.request)
    return asked, later


@pytest.mark.parametrize("name", KINDS)
def test_what_is_forced_is_computed_in_one_forward(name: str) -> None:
    company = Company(name)
    asked = company.admit(wish(LITERAL))
    company.finish()
    company.check()
    assert len(asked.text) == 12
    *prompt, first, jump, last = company.forward.calls
    # The first digit is drawn; it and what follows at once; the second digit, of which nobody knew that it is the end.
    assert sum(length for _, length in prompt) == len(PROMPT) - 1
    assert [first, jump, last] == [(1, 1), (1, 10), (1, 1)]


def test_what_an_answer_begins_with_is_part_of_the_prefill() -> None:
    company = Company("llama")
    asked = company.admit(wish('start: "<<<<<<<<" /[0-9]/ ">"'))
    company.advance()
    assert asked.text == "<<<<<<<<", "told before anything is computed"
    company.finish()
    company.check()
    assert company.forward.calls == [(1, len(PROMPT) + 7), (1, 1)]


def test_an_answer_that_is_forced_as_a_whole_needs_no_model() -> None:
    company = Company("llama")
    asked = company.admit(wish('start: "<<<<>>>>"'))
    company.finish()
    company.check()
    assert (asked.text, company.forward.calls) == ("<<<<>>>>", [])


def test_a_long_jump_is_taken_in_parts() -> None:
    company = Company("llama")
    asked = company.admit(wish(f'start: /[0-9]/ "{"=" * 150}" /[0-9]/', 200))
    company.finish()
    company.check()
    assert len(asked.text) == 152
    assert max(length for _, length in company.forward.calls[1:]) <= 65


def test_in_company_what_is_forced_is_drawn() -> None:
    company = Company("llama")
    first = company.admit(wish("start: /[0-9]{60}/", 60))
    company.until(lambda: len(first.tokens) > 5)
    asked = company.admit(wish('start: /[0-9]/ /[0-9]/ /[0-9]/ /[0-9]/ "<=======>" /[0-9]/ "!"'))
    company.until(lambda: company.phase(asked) == "batch")
    at = len(company.forward.calls)
    company.until(lambda: asked.finished is not None)
    assert set(company.forward.calls[at:]) <= {(2, 1), (1, 1)}
    company.finish()
    company.check()
    assert company.forward.most_rows == 2


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.5, seed=7),
        SamplingOptions(temperature=1.5, seed=7, top_k=8, repeat_penalty=1.3, repeat_last_n=9),
    ],
)
def test_a_seed_draws_the_same_with_and_without_a_jump(options: SamplingOptions) -> None:
    grammar = 'start: ("<==>" /[0-9]/){6}'
    texts = []
    for logprobs in (False, True):  # whoever asks for the probabilities gets every token drawn
        company = Company("llama")
        asked = company.admit(wish(grammar, options=replace(options, logprobs=logprobs)))
        company.finish()
        company.check()
        texts.append(asked.text)
        jumped = any(length > 1 for _, length in company.forward.calls[1:])
        assert jumped is not logprobs
    assert texts[0] == texts[1]


def test_the_probabilities_of_what_is_forced_are_those_of_the_model() -> None:
    company = Company("llama")
    asked = company.admit(wish(LITERAL, options=SamplingOptions(logprobs=True, top_logprobs=3)))
    company.finish()
    company.check()  # looks at each entry
    assert "".join(entry.token for entry in asked.entries) == asked.text
    assert min(entry.logprob for entry in asked.entries) < -3, "the model would have said something else"


@pytest.mark.parametrize("most", [1, 3, 9, 11, 12, 13])
def test_a_limit_that_cuts_the_answer_is_told_and_one_that_does_not_is_not(most: int) -> None:
    company = Company("llama")
    asked = company.admit(wish(LITERAL, most))
    company.finish()
    company.check()
    assert asked.finished is not None
    assert asked.finished.metrics.eval_count == min(most, 12)
    assert asked.finished.reason is (DoneReason.LENGTH if most < 12 else DoneReason.STOP)


def test_a_stop_string_in_what_is_forced_ends_the_answer() -> None:
    company = Company("llama")
    asked = company.admit(wish(LITERAL)._replace(stop="==>"))
    company.finish()
    company.check()
    assert asked.text == f"{asked.text[0]}<====="
    again = company.admit(wish(LITERAL)._replace(stop="==>"))
    company.finish()
    again.check_answer()
    assert again.cached == len(PROMPT) - 1


def test_a_conversation_that_goes_on_behind_a_jump_is_in_the_cache() -> None:
    company = Company("llama")
    asked = company.admit(wish(LITERAL))
    company.finish()
    said = alone("llama", asked.wish).tokens
    follower = company.admit(wish("start: /[0-9]/", prompt=(*PROMPT, *said, 1, 2)))
    company.finish()
    company.check()
    assert follower.cached == len(PROMPT) + len(said) - 1, "all but the last token, over which nothing was computed"


# --- grammars that are late, or never come


def test_a_grammar_that_takes_its_time_holds_up_nobody_else() -> None:
    company = Company("llama")
    asked, later = ask_later(company, wish(LITERAL))
    company.until(lambda: company.phase(asked) == "compiling")
    assert company.running.idle, "nothing to do until it arrives"
    assert asked.text == ""
    other = company.ask(PROMPT, 5)
    company.until(lambda: other.finished is not None)
    assert company.phase(asked) == "compiling"
    later.arrive(asked.wish)
    assert not company.running.idle
    company.finish()
    company.check()


def test_a_grammar_that_is_there_before_the_prompt_is_read_is_not_waited_for() -> None:
    company = Company("llama", parallel=1)
    first = company.ask(PROMPT, 5)
    asked, later = ask_later(company, wish(LITERAL))
    later.arrive(asked.wish)
    company.finish()
    assert first.finished
    company.check()


def test_a_grammar_that_is_none_ends_its_request_and_keeps_what_was_read() -> None:
    company = Company("llama")
    asked, later = ask_later(company, wish(LITERAL))
    company.until(lambda: company.phase(asked) == "compiling")
    later.set_exception(RequestError("Format: no such thing"))
    company.finish()
    assert not asked.failed, "the client reads it in the refusal"
    assert asked.text == ""
    company.check_cache()
    again = company.ask(PROMPT, 5)
    company.finish()
    again.check_answer()
    assert again.cached == len(PROMPT) - 1


def test_a_client_that_leaves_while_its_grammar_is_compiled_takes_its_place_with_it() -> None:
    company = Company("llama", parallel=1)
    asked, later = ask_later(company, wish(LITERAL))
    company.until(lambda: company.phase(asked) == "compiling")
    other = company.ask(PROMPT, 3)
    assert company.running.idle, "the only place is taken"
    asked.request.cancel()
    assert later.cancelled(), "nobody else waits for it"
    company.finish()
    assert other.finished
    assert asked.text == ""
    company.check_cache()


def test_a_grammar_that_the_vocabulary_cannot_spell_fails_alone() -> None:
    company = Company("llama")
    other = company.ask(range(30), 20)
    asked = company.admit(wish('start: /[0-9]/ "é"'))
    company.finish()
    (*_, last) = asked.told
    assert isinstance(last, Failed)
    assert "vocabulary" in last.text
    other.check_answer()
    company.check_cache()


class Breaks:
    """The forward over so many rows, the one with this number."""

    def __init__(self, rows: int, at: int) -> None:
        self._rows = rows
        self._left = at

    def __call__(self, rows: int, length: int) -> bool:
        self._left -= rows == self._rows
        return rows == self._rows and self._left == 0


@pytest.mark.parametrize("at", range(1, 8))
def test_a_step_that_raises_loses_nothing_of_a_constrained_answer(at: int) -> None:
    company = Company("llama")
    for row in range(2):
        company.admit(wish("start: /[0-9]{25}/", 25, tuple(range(row, 30))))
    company.admit(wish('start: (/[0-9]/ "=>"){9}', 40, tuple(range(5, 30))))
    company.forward.breaks = Breaks(3, at)
    company.finish()
    company.check()
    assert all(asked.finished for asked in company.everyone)
    assert company.forward.most_rows == 3


def test_a_mask_that_raises_sets_everyone_back_and_loses_nothing() -> None:
    wishes = [wish('start: (/[0-9]/ "=>"){9}', 40, tuple(range(row, 30))) for row in range(3)]
    for at in (5, 17, 18, 30):
        company = Company("llama")
        for each in wishes:
            company.admit(each)
        with breaking(Guide, "mask", at):
            company.finish()
        finished = [asked for asked in company.everyone if asked.finished]
        assert len(finished) >= len(wishes) - 1, "at most the one that computes alone may fail by it"
        for asked in finished:
            asked.check_answer()
        company.check_cache()


@pytest.mark.parametrize("name", KINDS)
def test_a_mask_that_is_late_holds_up_its_own_answer_only(name: str) -> None:
    company = Company(name)
    others = [company.ask(range(row, 30), 20) for row in range(2)]
    company.until(lambda: all(company.phase(other) == "batch" or company.taken() < 2 for other in others))
    late = company.admit(wish('start: (/[0-9]/ "=>"){9}', 40, tuple(range(5, 30))))
    company.until(lambda: len(late.tokens) > 1)
    company.late = lambda: 10**6
    company.until(lambda: all(other.finished for other in others))
    assert late.finished is None
    company.until(lambda: company.running.idle)
    assert company.running.expectant, "there is nothing to do but to wait for the mask"
    company.late = lambda: 0
    late.request.cancel()
    company.finish()
    company.check()


def test_who_is_late_parts_from_a_batch_and_the_batch_goes_on() -> None:
    company = Company("llama")
    for row in range(2):
        company.ask(range(row, 30), 30)
    late = company.admit(wish('start: (/[0-9]/ "=>"){9}', 40, tuple(range(5, 30))))
    company.until(lambda: company.phase(late) == "batch" and company.forward.most_rows == 3)
    at, company.late = len(company.forward.calls), lambda: 2
    company.until(lambda: company.phase(late) == "alone")
    company.late = lambda: 0
    company.finish()
    company.check()
    assert company.forward.calls[at:].count((2, 1)) > 10, "the others stay together"
    assert all(length == 1 for rows, length in company.forward.calls[at:] if rows > 1)
    assert sum(rows * length for rows, length in company.forward.calls[at:]) < 120, "nobody begins again"


def test_a_grammar_that_fails_in_a_batch_ends_its_answer_only() -> None:
    company = Company("llama")
    others = [company.ask(range(row, 30), 30) for row in range(2)]
    failing = company.admit(wish('start: /[0-9]{20}/ "é"', 40, tuple(range(5, 30))))
    company.until(lambda: company.phase(failing) == "batch" and company.forward.most_rows == 3)
    at = len(company.forward.calls)
    company.finish()
    (*_, last) = failing.told
    assert isinstance(last, Failed)
    for other in others:
        other.check_answer()
    company.check_cache()
    assert {length for _, length in company.forward.calls[at:]} == {1}, "nobody is set back"
    assert company.forward.calls[at:].count((2, 1)) > 5, "the others stay together"


def test_a_forced_text_comes_in_one_line() -> None:
    company = Company("llama")
    asked = company.admit(wish(LITERAL))
    company.finish()
    lines = [event.text for event in asked.told if isinstance(event, Text)]
    assert lines == [asked.text[:10], asked.text[10:]]
    assert text_of(asked.tokens) == asked.text
    mx.clear_cache()
