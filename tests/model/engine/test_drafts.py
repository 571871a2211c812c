"""An answer is the same with drafts as without them, alone or beside others, whoever makes the drafts; and so is what
the cache keeps of it. The drafts are those of a test, for each kind of model, or those of a model.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast
from unittest.mock import patch

import pytest

from runner.drafts.assistant import check_assistant, load_assistant
from runner.drafts.drafting import DraftModel
from runner.drafts.kinds import open_draft
from runner.engine.policy import SlicePolicy, StepLimit, Workload
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
from tests.lib.told_drafts import DRAFTABLE, EOS, OPTIONS, STRATEGIES, Seen, Told, ToldTogether, seen, spec, told
from tests.model.drafts.assistant.made import write
from tests.model.drafts.models import (
    ASSISTANTS,
    MODELS,
    TOGETHER,
    Broken,
    Noting,
    Prompted,
    Righted,
    Stranger,
    Willing,
    finish,
    own_model,
    rounds_together,
    turns,
)

CACHES = ("trie", "single", "none")
TARGETS = ("llama", "gemma3", "qwen3_next")
DRAFTERS = (*BATCHABLE, *TOGETHER)
"""A kind of model whose drafts a test makes, or a model that drafts for several answers."""
COUNTS = ("2", "3", "4", "8")
LATE = ("0", "0 0 1", "0 3 0 9")
"""The steps by which masks may be late."""
GRAMMARS = {
    "digits": "start: /[0-9]{4,30}/",
    "an end that depends": 'start: ("<>" /[1-3]/)* "."',
    "forced text between": 'start: (/[0-9]/ "<=====>")* "!"',
    "alternatives": 'start: ("123, " | "45, " | "1236789; ")+ "!!!"',
    "nested": 'start: value\nvalue: "(" (value ("," value)*)? ")" | /[1-3]{1,3}/',
    "anything": "start: /[^9]*/",
}
FORMATTED = ("greedy", "drawn", "penalties", "log-probabilities")


@pytest.fixture(autouse=True)
def _nothing_breaks(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A batch that failed would be broken up, a model that failed dropped: the answers would be right all the same."""
    yield
    if not any(fault in request.node.name for fault in ("memory", "fails", "cannot draft")):
        assert not [each.message for each in caplog.get_records("call") if each.levelno >= logging.ERROR]


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


class Drafted(NamedTuple):
    """An engine whose answers are drafted."""

    engine: TinyEngine
    name: str
    """The kind of model that answers."""
    told: list[Told]
    """The drafters of a test, one for each answer."""
    model: Righted | None
    drafting: Willing | None

    @classmethod
    def by(
        cls,
        drafter: str,
        strategy: str,
        asked: Sequence[RequestSpec] = (),
        schedule: RandomPolicy | None = None,
        **arguments: object,
    ) -> "Drafted":
        """A model can put right its drafts for the requests `asked`."""
        if drafter not in TOGETHER:
            engine = TinyEngine(drafter, schedule, **arguments)  # type: ignore[arg-type]
            return cls(engine, drafter, told(engine, strategy), None, None)
        name, make = TOGETHER[drafter]
        model = Righted(make(), name, strategy, asked)
        drafting = Willing(model)
        return cls(drafting.engine(name, schedule, **arguments), name, [], model, drafting)

    def check_drafts(self, strategy: str, count: int) -> None:
        """Asserts that several of `count` answers were drafted at once, as rightly as the strategy drafts."""
        outcomes = [each for drafter in self.told for each in drafter.rounds]
        together = True
        if self.model is not None and self.drafting is not None:
            drafted, accepted = (
                each["model"] for each in (self.drafting.counts().drafted, self.drafting.counts().accepted)
            )
            outcomes = [(drafted, accepted)]
            assert drafted
            assert self.model.nbytes <= self.model.most_bytes(8)
            together = count <= self.model.most_together
            assert not together or max(self.model.proposed) > count // 2
        assert rounds_together(self.engine) or not together or (self.told and strategy == "one at a time")
        assert strategy != "right" or all(drafts == right for drafts, right in outcomes)
        assert strategy != "wrong" or not any(right for _, right in outcomes)


def all_at_once(drafter: str, asked: Sequence[RequestSpec], strategy: str) -> Drafted:
    """Answers these together."""
    drafted = Drafted.by(drafter, strategy, asked, eos=asked[0].eos)
    for each in asked:
        drafted.engine.submit(each)
    finish(drafted.engine)
    return drafted


def several(count: int, options: str, max_tokens: int = 24) -> list[RequestSpec]:
    """Requests of other lengths, half of them with other options."""
    others = [*OPTIONS]
    return [
        spec(options if place % 2 else others[place % len(others)], max_tokens, prompt=words(12 + 7 * place, place))
        for place in range(1, count + 1)
    ]


@pytest.mark.parametrize(("name", "options", "strategy", "cache"), pairs(DRAFTABLE, OPTIONS, STRATEGIES, CACHES))
def test_drafts_change_nothing(name: str, options: str, strategy: str, cache: str) -> None:
    asked = spec(options)
    assert with_strategy(strategy, name, asked, cache) == plain(name, asked, cache)


@pytest.mark.parametrize(
    ("name", "options", "model", "cache"),
    [*pairs(TARGETS, OPTIONS, MODELS, CACHES), *pairs(("gemma4",), OPTIONS, ASSISTANTS, CACHES)],
)
def test_a_models_drafts_change_nothing(name: str, options: str, model: str, cache: str) -> None:
    asked = spec(options)
    drafts = MODELS[model](name) if model in MODELS else ASSISTANTS[model]()
    if isinstance(drafts, Prompted):
        drafts.asked = asked
    drafting, count = Willing(drafts), 3 if model in ASSISTANTS else 2
    assert with_model(drafting, name, asked, cache, count) == plain(name, asked, cache, count)
    assert drafting.drafted > 0
    if isinstance(drafts, Noting):
        assert len(drafts.lengths) > 30
        assert all(drafts.lengths)
    if isinstance(drafts, Prompted):
        assert 0 < drafting.counts().accepted["model"] < drafting.drafted
        assert (state := drafting.counts().model) is not None
        assert 0 < state.bytes <= drafts.most_bytes(8)


@pytest.mark.parametrize(("drafter", "options", "strategy", "count"), pairs(DRAFTERS, OPTIONS, STRATEGIES, COUNTS))
def test_each_answer_is_the_one_that_it_is_alone(drafter: str, options: str, strategy: str, count: str) -> None:
    all_at_once(drafter, several(int(count), options), strategy).check_drafts(strategy, int(count))


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


@pytest.mark.parametrize(
    ("grammar", "options", "strategy", "late", "drafter"),
    [
        *(
            (*row, "qwen3_next")
            for row in pairs(("digits", "forced text between"), FORMATTED, STRATEGIES, ("0", "0 0 1", "0 3 0 9"))
        ),
        *(("digits", "drawn", "random", "0", model) for model in TOGETHER),
    ],
)
def test_formats_look_ahead_for_each_of_them(
    grammar: str, options: str, strategy: str, late: str, drafter: str
) -> None:
    """Those whose masks are late do not hold up the others."""
    asked = [each._replace(eos=frozenset({EOS})) for each in several(4, options)]
    asked[::2] = [each._replace(grammar=GRAMMARS[grammar]) for each in asked[::2]]
    engine = Drafted.by(drafter, strategy, asked, eos=asked[0].eos).engine
    numbers, delays = random.Random(3), [int(each) for each in late.split()]
    engine.late = lambda: numbers.choice(delays)
    for each in asked:
        engine.submit(each)
    finish(engine)
    assert rounds_together(engine) or late != "0" or strategy == "one at a time"


def test_a_mask_that_is_late_in_a_round_leaves_the_others_what_was_right() -> None:
    engine = TinyEngine("llama")
    drafters = told(engine, "right, of any length")
    asked = several(3, "drawn", 80)
    asked[0] = asked[0]._replace(grammar="start: /[0-9]{40,60}/")
    late, *others = [engine.submit(each) for each in asked]
    engine.until(lambda: all(engine.phase(each) == "batch" for each in (late, *others)))
    before = rounds_together(engine)
    engine.until(lambda: rounds_together(engine) > before + 1)
    engine.late = lambda: 9
    engine.until(lambda: engine.phase(late) == "alone")
    assert engine.forward.calls[-1][0] == 3
    assert engine.forward.calls[-1][1] > 1, "a round"
    engine.late = lambda: 0
    for drafter in drafters:  # the next step is one without drafts
        drafter.coming = lambda *_: []  # type: ignore[method-assign]
    assert all(engine.phase(each) == "batch" for each in others)
    finish(engine)


@pytest.mark.parametrize(("name", "place", "strategy"), pairs(TARGETS, map(str, range(1, 12)), ("right", "random")))
def test_an_answer_may_end_anywhere_in_a_round(name: str, place: str, strategy: str) -> None:
    """By an end-of-sequence token, a stop string, or its length: the cache keeps what it keeps without drafts."""
    asked, tokens = spec("drawn", 12), int(place)
    token = oracle_answer(name, asked).tokens[tokens - 1]
    for changes in ({"eos": frozenset({token})}, {"stop": text_of([token])}, {"max_tokens": tokens}):
        ends = asked._replace(**changes)
        assert with_strategy(strategy, name, ends) == plain(name, ends), changes


@pytest.mark.parametrize(("drafter", "place", "strategy"), pairs(DRAFTERS, map(str, range(1, 8)), ("right", "random")))
def test_one_of_them_may_end_anywhere_in_a_round(drafter: str, place: str, strategy: str) -> None:
    """By an end-of-sequence token, a stop string, or its length; the others go on."""
    tokens, name = int(place), TOGETHER[drafter][0] if drafter in TOGETHER else drafter
    for change in ("eos", "stop", "max_tokens"):
        asked = several(3, "drawn", 16)
        token = oracle_answer(name, asked[1]).tokens[tokens - 1]
        if change == "eos":
            asked = [each._replace(eos=frozenset({token})) for each in asked]
        elif change == "stop":
            asked[1] = asked[1]._replace(stop=text_of([token]))
        else:
            asked[1] = asked[1]._replace(max_tokens=tokens)
        all_at_once(drafter, asked, strategy)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_right_drafts_save_forwards_and_the_cache_keeps_as_much(drafter: str) -> None:
    """Without drafts, four answers of 40 tokens take 44 forwards, their prompts included."""
    asked = several(4, "drawn", 40)
    together = all_at_once(drafter, asked, "right")
    assert len(together.engine.forward.calls) < 18
    for each in asked if together.model is None else ():
        alone = TinyEngine(together.name)
        alone.submit(each)
        alone.finish()
        again = each._replace(prompt=(*each.prompt, *oracle_answer(together.name, each).tokens, *words(7, 3)))
        cached = []
        for engine in (together.engine, alone):
            cached.append(engine.submit(again))
            engine.finish()
            engine.check()
        assert cached[0].cached == cached[1].cached


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_come_and_go_and_some_find_no_memory(drafter: str) -> None:
    together = 0
    for seed in range(2):
        numbers, asked = random.Random(f"{drafter} {seed}"), list[RequestSpec]()
        drafted = Drafted.by(drafter, "random", asked, RandomPolicy(numbers), budget=2_000_000, parallel=5)
        engine = drafted.engine
        engine.forward.error = MemoryError
        for number in range(12):
            prompt = (*words(numbers.choice((5, 20, 70)), number % 3), *words(number % 5, 9))
            asked.append(spec(numbers.choice([*OPTIONS]), numbers.randint(3, 40), prompt=prompt))
            engine.submit(asked[-1])
            engine.advance(numbers.randint(0, 30))
            if numbers.random() < 0.3:
                numbers.choice(engine.requests).request.cancel()
            if numbers.random() < 0.2:
                engine.forward.breaks = at_call(numbers.randint(1, 4))
        engine.finish()
        engine.check()
        together += rounds_together(engine)
        if drafted.model is not None and drafted.drafting is not None:
            assert drafted.model.nbytes <= drafted.model.most_bytes(8)
            assert (state := drafted.drafting.counts().model) is not None
            assert state.state == "on"
    assert together


def test_a_round_counts_by_what_it_computes() -> None:
    drafted = all_at_once("llama", several(4, "greedy"), "right, of any length")
    lengths = cast("ToldTogether", drafted.told[0].shared).rounds_together
    assert any(length % 1 for length in lengths), "four of one length cannot be meant"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_after_a_round_has_two_forwards_only_if_its_limit_allows_that(ahead: bool) -> None:
    class Limited(SlicePolicy):
        def step_limit(self, work: Workload, index: int) -> StepLimit:
            return super().step_limit(work, index)._replace(ahead=ahead)

    engine = TinyEngine("llama", Limited(2048, 0.1))
    drafters = told(engine, "random")
    engine.submit(spec("drawn"))
    finish(engine)
    lengths = cast("ToldTogether", drafters[0].shared).lengths
    assert (-1 in lengths) == ahead
    assert max(lengths) > 1


@pytest.mark.parametrize("name", ["llama4", "quantized"])
def test_answers_that_take_turns_are_drafted_in_turn(name: str) -> None:
    engine = TinyEngine(name)
    drafters = told(engine, "right")
    asked = [engine.submit(each) for each in several(2, "greedy", 60)]
    engine.until(lambda: len(engine.scheduler.batches.all) == 2)
    engine.until(lambda: all(len(each.tokens) > 20 for each in asked))
    assert sum(bool(drafter.rounds) for drafter in drafters) == 2
    finish(engine)


def test_layers_that_cannot_go_back_row_by_row_go_on_without_drafts() -> None:
    """One forward finds out."""
    engine = TinyEngine("mamba2")
    told(engine, "right")
    for each in several(2, "drawn", 30):
        engine.submit(each)
    with patch("runner.cache.layers.scans.StateReads.known", False):
        engine.until(lambda: rounds_together(engine) > 0)
        finish(engine)
    assert rounds_together(engine) == 1


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


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((f"{name}-seeing", "an assistant") for name in ("gemma4", "gemma4-unified")),
        *((f"{name}-seeing", "a stranger") for name in ("gemma4", "qwen3.5")),
    ],
)
def test_answers_are_drafted_behind_pictures(name: str, model: str, together: bool, tmp_path: Path) -> None:
    """Each behind its own positions. The engine's own check compares each answer with a plain loop."""
    plain, drafts = SeeingEngine(name), cast("DraftModel", Stranger())
    if model == "an assistant":
        opened = open_draft(str(write(tmp_path / "assistant", config_of())), tmp_path).model
        check_assistant(opened, plain.model.opened, plain.model.loaded)
        drafts = Noting(load_assistant(opened, plain.model.loaded).assistant)
    drafting = Willing(drafts)
    engine = SeeingEngine(name, drafting=drafting, watch=drafting.watch)
    asked = ("what is [img-0] here?", "what is [img-0] here? and there", "Look, with care, at that: [img-0]")
    if together:
        for prompt in (*asked, "and there is none"):
            engine.ask(prompt, *[picture("red")] * ("img" in prompt), max_tokens=24, temperature=0.7, seed=3)
        engine.finish()
    else:
        for prompt in asked:
            one, other = (
                each.answer(prompt, picture("red"), max_tokens=12, temperature=0.7, seed=3) for each in (engine, plain)
            )
            assert one.tokens == other.tokens
    assert drafting.most_together > 2 or not together
    engine.check()
    assert drafting.drafted > 20
