"""The ways in which an answer ends too early: how each counts, and what the cache keeps of it.

Only a forward that broke off makes the layers of a request worthless. Whatever else ends an answer, what was computed
for it stays: the prompt need not be computed again.
"""

import logging
from concurrent.futures import Future
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.engine.answer_grammar import Grammar, StateTape
from runner.engine.batch import Batch
from runner.engine.events import Failed
from runner.engine.generation import Generation
from runner.engine.memory import MemoryBudget
from runner.engine.policy import SlicePolicy, StepLimit
from runner.errors import RequestError
from runner.grammar.guide import Guide
from runner.grammar.matcher import GrammarMatcher
from runner.sampling import SamplingOptions
from runner.sampling.sample import SampledTokens
from runner.sampling.sampler import Sampler
from runner.tokenizer import Tokenizer
from runner.tokenizer.detokenizer import Detokenizer
from scripts.tools.models.tiny import words
from tests.lib.breaking import breaking
from tests.lib.tiny_engine import ClientRequest, RequestSpec, TinyEngine, oracle_answer, text_of
from tests.lib.told_drafts import seen

PROMPT = tuple(words(50))
DIGITS = "start: /[0-9]{15}/"


class Fault(NamedTuple):
    """The call of a function that raises while an answer is computed."""

    where: object
    name: str
    at: int
    error: type[Exception] = ValueError
    grammar: str = ""
    options: SamplingOptions = SamplingOptions()

    def __str__(self) -> str:
        return f"{getattr(self.where, '__name__', '')}.{self.name}-{self.error.__name__}"

    def ask(self, engine: TinyEngine) -> ClientRequest:
        return engine.submit(RequestSpec(PROMPT, 15, self.options, grammar=self.grammar))


OUTSIDE = [
    Fault(GrammarMatcher, "follow", 5, RequestError, DIGITS),  # the worker is gone
    Fault(Guide, "take", 5, RequestError, DIGITS),
    Fault(Detokenizer, "push", 5),
    Fault(Detokenizer, "finish", 0),
    Fault(Tokenizer, "token_text", 5, options=SamplingOptions(logprobs=True)),
    Fault(Batch, "__init__", 0),
    Fault(Sampler, "__call__", 5, RequestError),
]
"""Faults outside of forwards: the layers are sound."""
WITHIN = [
    Fault(Generation, "prefill", 0),
    Fault(mx, "eval", 1),  # the first one resumes
    Fault(Sampler, "__call__", 5),
    Fault(mx, "async_eval", 5),
    Fault(SampledTokens, "read", 5),
]
"""Faults while a forward is dispatched or evaluated: nobody knows what the layers hold."""


FREED = ["live entries of the cache are freed"]


def end(engine: TinyEngine, fault: Fault) -> ClientRequest:
    """Computes a request up to the fault."""
    with breaking(fault.where, fault.name, fault.at, fault.error) as calls:
        ended = fault.ask(engine)
        engine.finish()
    assert len(calls) > fault.at
    assert ended.failed
    engine.check_cache()
    return ended


def cached_afterwards(engine: TinyEngine, ended: ClientRequest) -> int:
    """Returns the tokens that are cached when the client asks again. Checks that the answer is that of the model."""
    again = engine.ask([*PROMPT, *ended.tokens, 1], 6)
    engine.finish()
    again.check_answer()
    engine.check_cache()
    return again.cached


@pytest.mark.parametrize("fault", [*OUTSIDE, *WITHIN], ids=str)
def test_what_is_computed_is_freed_only_after_a_fault_within_a_forward(
    fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    engine = TinyEngine("llama")
    ended = end(engine, fault)
    assert engine.journal.outcomes == {"failed": 1}
    assert [line for line in caplog.messages if "freed" in line] == FREED * (fault in WITHIN)
    cached = cached_afterwards(engine, ended)
    assert cached == 0 if fault in WITHIN else cached >= len(PROMPT) + len(ended.tokens) - 1


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
@pytest.mark.parametrize("rows", [1, 2])
def test_layers_that_cannot_go_back_are_kept_as_far_as_they_are_right(name: str, rows: int) -> None:
    engine = TinyEngine(name)
    others = [engine.ask(words(40, 5), 25) for _ in range(rows - 1)]
    ended = end(engine, OUTSIDE[0])
    for other in others:
        other.check_answer()
    assert engine.forward.most_rows == rows
    cached_afterwards(engine, ended)


def test_a_fault_after_a_known_first_token_keeps_it_known() -> None:
    engine = TinyEngine("llama", first_tokens=True)
    first = engine.ask(PROMPT, 30)
    engine.finish()
    with breaking(Detokenizer, "push", 0, ValueError):
        known = engine.ask(PROMPT, 30)
        engine.finish()
    assert not first.failed
    assert known.failed
    forwards = len(engine.forward.calls)
    again = engine.ask(PROMPT, 30)
    engine.until(lambda: bool(again.text))
    assert len(engine.forward.calls) == forwards
    engine.finish()
    again.check_answer()


def test_an_answer_that_ends_for_want_of_room_keeps_its_prompt_while_there_is_room() -> None:
    engine = TinyEngine("llama")
    asked = engine.ask(PROMPT, 15)
    engine.until(lambda: len(asked.tokens) > 5)
    (generation,) = engine.generations()
    with patch.object(MemoryBudget, "fit", side_effect=[(generation, "no room"), None, None]):
        engine.scheduler._make_room()
        engine.finish()
    assert asked.received[-1] == Failed("no room")
    assert cached_afterwards(engine, asked) >= len(PROMPT) - 1


def test_a_request_that_cannot_begin_costs_the_others_nothing() -> None:
    engine = TinyEngine("llama")
    first = engine.ask(PROMPT, 5)
    engine.finish()
    with breaking(Generation, "__init__", 0, ValueError):
        broken = engine.ask(PROMPT, 5)
        engine.finish()
    assert broken.failed
    assert cached_afterwards(engine, first) >= len(PROMPT)


class Released:
    """A grammar whose client has left since it was compiled."""

    def guide(self, tape: StateTape | None = None) -> None:
        return None

    def release(self) -> None: ...


def test_clients_that_leave_as_their_grammar_starts_are_counted_as_such_and_keep_the_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    engine = TinyEngine("llama")
    for number in range(4):
        asked, compiling = (
            ClientRequest(engine.kind, RequestSpec((*PROMPT, number), 9, SamplingOptions())),
            Future[Grammar](),
        )
        asked.request.grammar = compiling
        engine.requests.append(asked)
        engine.scheduler.add(asked.request)
        engine.until(lambda asked=asked: engine.phase(asked) == "compiling")  # type: ignore[misc]
        compiling.set_result(Released())
        engine.finish()
        assert not asked.failed
    assert engine.journal.outcomes == {"cancelled": 4}
    assert "cannot go on" not in caplog.text
    assert "freed" not in caplog.text
    assert cached_afterwards(engine, asked) >= len(PROMPT)


def test_a_format_that_could_not_be_compiled_for_a_fault_of_ours_is_no_refusal() -> None:
    engine = TinyEngine("llama")
    for error in (RequestError("Format: no such thing"), ValueError("a fault")):
        asked, compiling = ClientRequest(engine.kind, RequestSpec(PROMPT, 9, SamplingOptions())), Future[Grammar]()
        asked.request.grammar = compiling
        engine.scheduler.add(asked.request)
        compiling.set_exception(error)
        engine.finish()
    assert engine.journal.outcomes == {"refused": 1, "failed": 1}


def test_the_cache_keeps_as_much_of_an_answer_however_long_steps_take() -> None:
    """An answer whose first token is known, and whose second one ends it: the step after that is dispatched before it
    is read, or not."""
    begun = oracle_answer("llama", RequestSpec(PROMPT, 2, SamplingOptions())).tokens
    nodes = []
    for ahead in (True, False):
        policy = SlicePolicy(2048, 0.1)
        policy.step_limit = lambda work, index, ahead=ahead: StepLimit(ahead=ahead)  # type: ignore[method-assign,misc]
        engine = TinyEngine("llama", policy, first_tokens=True)
        engine.ask(PROMPT, 2)
        engine.finish()
        engine.ask(PROMPT, 9, stop=text_of(begun))
        engine.finish()
        engine.check()
        assert engine.journal.known == 1
        nodes.append(seen(engine).nodes)
    assert nodes[0] == nodes[1]
