"""An answer is the same with drafts as without them, whoever makes them, and so is what the cache keeps of it."""

import logging
import random
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from runner.drafts.assistant import check_assistant, load_assistant
from runner.drafts.drafting import DraftedAnswer
from runner.drafts.kinds import open_draft
from runner.drafts.own_model import OwnDraftModel
from scripts.tools.models.assistants import config_of
from scripts.tools.models.tiny import words
from tests.lib.pairs import pairs
from tests.lib.seeing_engine import SeeingEngine, picture
from tests.lib.tiny_engine import (
    BATCHABLE,
    ClientRequest,
    RandomPolicy,
    RequestSpec,
    TinyEngine,
    at_call,
    oracle_answer,
    text_of,
)
from tests.lib.told_drafts import DRAFTABLE, EOS, OPTIONS, STRATEGIES, Seen, seen, spec, told
from tests.model.drafts.assistant.made import write
from tests.model.drafts.models import ASSISTANTS, MODELS, Broken, Noting, Prompted, Willing, own_model, turns

CACHES = ("trie", "single", "none")
TARGETS = ("llama", "gemma3", "qwen3_next")
GRAMMARS = {
    "digits": "start: /[0-9]{4,30}/",
    "an end that depends": 'start: ("<>" /[1-3]/)* "."',
    "forced text between": 'start: (/[0-9]/ "<=====>")* "!"',
    "alternatives": 'start: ("123, " | "45, " | "1236789; ")+ "!!!"',
    "nested": 'start: value\nvalue: "(" (value ("," value)*)? ")" | /[1-3]{1,3}/',
    "anything": "start: /[^9]*/",
}


def seen_in(engine: TinyEngine, asked: Sequence[RequestSpec]) -> Seen:
    for each in asked:
        engine.submit(each)
        engine.finish()
    engine.check()
    return seen(engine)


def plain(name: str, asked: RequestSpec, cache: str = "trie", count: int = 2) -> Seen:
    """What clients and the cache have of `count` turns, without drafts."""
    return seen_in(TinyEngine(name, cache=cache, eos=asked.eos), turns(name, asked)[:count])


def with_model(drafting: Willing, name: str, asked: RequestSpec, cache: str = "trie", count: int = 2) -> Seen:
    """The same with the drafts of a model."""
    return seen_in(drafting.engine(name, cache=cache, eos=asked.eos), turns(name, asked)[:count])


def with_strategy(strategy: str, name: str, asked: RequestSpec, cache: str = "trie") -> Seen:
    """The same with drafts that are told."""
    engine = TinyEngine(name, cache=cache, eos=asked.eos)
    drafters = told(engine, strategy)
    found = seen_in(engine, turns(name, asked)[:2])
    rounds = [each for drafter in drafters for each in drafter.rounds]
    if asked.max_tokens >= 20 and not asked.grammar:
        assert rounds
        assert strategy != "right" or all(drafts == right for drafts, right in rounds)
        assert strategy != "wrong" or not any(right for _, right in rounds)
    return found


@pytest.mark.parametrize(("name", "options", "strategy", "cache"), pairs(DRAFTABLE, OPTIONS, STRATEGIES, CACHES))
def test_drafts_change_nothing(name: str, options: str, strategy: str, cache: str) -> None:
    asked = spec(options)
    assert with_strategy(strategy, name, asked, cache) == plain(name, asked, cache)


@pytest.mark.parametrize(("name", "options", "model", "cache"), pairs(TARGETS, OPTIONS, MODELS, CACHES))
def test_a_models_drafts_change_nothing(name: str, options: str, model: str, cache: str) -> None:
    asked, drafts = spec(options), MODELS[model](name)
    if isinstance(drafts, Prompted):
        drafts.asked = asked
    drafting = Willing(drafts)
    assert with_model(drafting, name, asked, cache) == plain(name, asked, cache)
    assert drafting.drafted > 0
    if isinstance(drafts, Prompted):
        assert 0 < drafting.counts().accepted["model"] < drafting.drafted
        assert (state := drafting.counts().model) is not None
        assert 0 < state.bytes <= drafts.most_bytes(8)


@pytest.mark.parametrize(("options", "kind", "cache"), pairs(OPTIONS, ASSISTANTS, CACHES))
def test_an_assistants_drafts_change_nothing(options: str, kind: str, cache: str) -> None:
    asked, model = spec(options), ASSISTANTS[kind]()
    assert with_model(Willing(model), "gemma4", asked, cache, 3) == plain("gemma4", asked, cache, 3)
    assert len(model.lengths) > 30
    assert all(model.lengths)


FORMATTED = ("greedy", "drawn", "penalties", "log-probabilities")


@pytest.mark.parametrize(
    ("grammar", "options", "strategy", "name"), pairs(GRAMMARS, FORMATTED, (*STRATEGIES, "itself", "blocks"), TARGETS)
)
def test_drafts_change_nothing_in_a_format(grammar: str, options: str, strategy: str, name: str) -> None:
    """The grammar looks ahead along them."""
    asked = spec(options, 24)._replace(grammar=GRAMMARS[grammar])
    for eos in (frozenset[int](), frozenset({EOS})):
        asked = asked._replace(eos=eos)
        if strategy in STRATEGIES:
            found = with_strategy(strategy, name, asked)
        else:
            found = with_model(Willing(MODELS[strategy](name)), name, asked)
        assert found == plain(name, asked)


def test_a_draft_may_take_several_tokens_of_a_format() -> None:
    engine = TinyEngine("llama")
    drafters = told(engine, "right")
    engine.submit(spec("greedy", 24)._replace(grammar=GRAMMARS["digits"]))
    engine.finish()
    assert any(right > 1 for drafter in drafters for _, right in drafter.rounds)


@pytest.mark.parametrize(("name", "place", "strategy"), pairs(TARGETS, map(str, range(1, 12)), ("right", "random")))
def test_an_answer_may_end_anywhere_in_a_round(name: str, place: str, strategy: str) -> None:
    """By an end-of-sequence token, a stop string, or its length: the cache keeps what it keeps without drafts."""
    asked, tokens = spec("drawn", 12), int(place)
    token = oracle_answer(name, asked).tokens[tokens - 1]
    for changes in ({"eos": frozenset({token})}, {"stop": text_of([token])}, {"max_tokens": tokens}):
        ends = asked._replace(**changes)
        assert with_strategy(strategy, name, ends) == plain(name, ends), changes


# --- answers that come and go


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, model) for name in TARGETS for model in ("itself", "blocks")), ("gemma4", "every token")],
)
def test_one_model_drafts_for_answers_that_come_and_go(name: str, model: str, seed: int) -> None:
    """It turns from one to the other; some of them are cancelled, restart, or go on in a batch."""
    drafts = MODELS[model](name) if model in MODELS else ASSISTANTS[model]()
    numbers, drafting = random.Random(seed), Willing(drafts)
    engine = drafting.engine(name, RandomPolicy(numbers), budget=600_000, parallel=4)
    for number in range(10):
        prompt = (*words(numbers.choice((20, 30, 70)), number % 3), *words(number % 5, 9))
        engine.submit(spec(numbers.choice([*OPTIONS]), numbers.randint(3, 30), prompt=prompt))
        engine.advance(numbers.randint(0, 40))
        if numbers.random() < 0.2:
            numbers.choice(engine.requests).request.cancel()
        if numbers.random() < 0.2:
            engine.forward.error = MemoryError
            engine.forward.breaks = at_call(numbers.randint(1, 3))
    engine.finish()
    engine.check()
    assert drafting.drafted > 10
    if model == "itself":
        assert drafting.counts().accepted["model"] > drafting.drafted / 2  # some of the answers ended inside a round
    assert (state := drafting.counts().model) is not None
    assert state.state == "on"
    assert drafts.nbytes <= drafts.most_bytes(8)


def test_a_request_may_limit_its_drafts() -> None:
    engine = TinyEngine("llama")
    drafters = told(engine, "right")
    limited = ClientRequest(engine.kind, spec("greedy"))
    limited.request.most_drafts = 2
    engine.requests.append(limited)
    engine.scheduler.add(limited.request)
    engine.finish()
    engine.check()
    assert {drafts for drafts, _ in drafters[0].rounds} <= {1, 2}


# --- what a model reads, and how it fails


@pytest.mark.parametrize("name", BATCHABLE)
def test_a_model_that_is_the_answers_own_is_always_right(name: str) -> None:
    """It draws with the same numbers, filters and penalties, and goes back to where it should."""
    for options in ("greedy", "drawn", "filtered", "penalties"):
        drafting = Willing(own_model(name))
        with_model(drafting, name, spec(options))
        assert drafting.counts().accepted["model"] == drafting.drafted > 20
        assert (state := drafting.counts().model) is not None
        assert state.bytes > 0


def test_a_model_that_fails_is_not_used_again_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Broken(3)
    drafting = Willing(model)
    with caplog.at_level(logging.INFO):
        assert with_model(drafting, "llama", spec("drawn")) == plain("llama", spec("drawn"))
    assert [record.message for record in caplog.records if "draft model" in record.message] == [
        "the draft model failed; answers go on without it"
    ]
    assert model.freed
    assert (state := drafting.counts().model) is not None
    assert state.state == "off"
    assert "RuntimeError" in state.why
    assert drafting.counts().state == "on"  # what is known is still drafted


@pytest.mark.parametrize(
    ("model", "least", "tokens"),
    [
        ("itself", 11, 12),  # 8 steps, and parts of 64 tokens until 256 are read
        ("blocks", 7, 8),  # of 64 tokens, of the last 512
    ],
)
def test_a_long_prompt_is_read_in_parts_while_the_answer_goes_on(model: str, least: int, tokens: int) -> None:
    """The prompt has 1,000 tokens."""
    drafts = MODELS[model]("llama")
    reads, read = list[bool](), drafts.read_texts

    def noted(answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:
        reads.append(read(answers, briefly=briefly))
        return reads[-1]

    drafts.read_texts = noted  # type: ignore[method-assign]
    engine = Willing(drafts).engine("llama")
    asked = engine.submit(spec("greedy", 30, prompt=words(1000)))
    engine.until(lambda: reads.count(False) == 1)
    assert least <= reads.count(True) <= least + 1
    assert len(asked.tokens) >= tokens
    engine.finish()
    engine.check()


def noted_lengths(model: OwnDraftModel) -> list[int]:
    """The tokens of each of its forwards from now on."""
    lengths, compute = list[int](), model._forward

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        lengths.append(tokens.shape[1])
        return compute(tokens, layers)

    model._forward = forward
    return lengths


def test_for_a_single_try_a_short_end_of_the_text_is_read() -> None:
    """Where drafts do not pay, one is tried now and then: that must not cost the reading of every prompt."""
    model = own_model("llama")
    lengths = noted_lengths(model)
    drafting = Willing(model, length=1)
    engine = drafting.engine("llama")
    engine.submit(spec("greedy", 10, prompt=words(1000)))
    engine.finish()
    engine.check()
    assert drafting.drafted > 2
    assert sum(lengths) <= 64


ABOUT_PICTURES = ("what is [img-0] here?", "what is [img-0] here? and there", "Look, with care, at that: [img-0]")


def asked_about_pictures(engine: SeeingEngine) -> list[Sequence[int]]:
    asked = [engine.answer(prompt, picture("red"), max_tokens=12, temperature=0.7, seed=3) for prompt in ABOUT_PICTURES]
    return [each.tokens for each in asked]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["gemma4-seeing", "gemma4-unified-seeing"])
def test_an_assistant_drafts_behind_pictures(name: str, together: bool, tmp_path: Path) -> None:
    """The engine's own check compares each answer with a plain loop."""
    plain = SeeingEngine(name)
    opened = open_draft(str(write(tmp_path / "assistant", config_of())), tmp_path).model
    check_assistant(opened, plain.model.opened, plain.model.loaded)
    model = Noting(load_assistant(opened, plain.model.loaded).assistant)
    drafting = Willing(model)
    engine = SeeingEngine(name, drafting=drafting, watch=model.watch)
    if together:
        for prompt in (*ABOUT_PICTURES, "and there is none"):
            engine.ask(prompt, *[picture("red")] * ("img" in prompt), max_tokens=24, temperature=0.7, seed=3)
        engine.finish()
        assert model.most > 2
    else:
        assert asked_about_pictures(engine) == asked_about_pictures(plain)
        assert all(model.lengths)
    engine.check()
    assert drafting.drafted > 20
