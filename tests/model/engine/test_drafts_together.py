"""Answers that decode together are drafted together, and each of them is the same as alone and without drafts.

The drafts are those of a test, for each kind of model, or those of a model, which are put right or wrong.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.cache.session import Session
from runner.drafts.assistant import AssistantDrafter, read_shared
from runner.drafts.dflash.drafter import BlockDrafter
from runner.drafts.draft_policy import Draft, DraftPolicy, Terms
from runner.drafts.drafting import AnswerDrafter, Drafting, DraftModel, StepTime
from runner.drafts.heads.head import HeadDrafter
from runner.drafts.own_model import OwnDraftModel
from runner.drafts.target import Tap, target_of
from runner.engine.generation import Generation
from runner.engine.policy import SlicePolicy, StepLimit, Workload
from scripts.tools.models.tiny import tiny, words
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
from tests.lib.told_drafts import EOS, OPTIONS, STRATEGIES, Told, ToldTogether, spec, told
from tests.model.drafts.dflash import tiny_drafts
from tests.model.drafts.models import TOGETHER, Righted, Willing

DRAFTERS = (*BATCHABLE, *TOGETHER)
"""A kind of model whose drafts a test makes, or a model that drafts."""
COUNTS = ("2", "3", "4", "8")
DIGITS = "start: /[0-9]{4,30}/"
FORCING = 'start: (/[0-9]/ "<=====>")* "!"'
FORMATTED = ("greedy", "penalties", "log-probabilities")


@pytest.fixture(autouse=True)
def _nothing_breaks(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A batch that failed would be broken up, a model that failed dropped: the answers would be right all the same."""
    yield
    if "memory" not in request.node.name:
        assert not [each.message for each in caplog.get_records("call") if each.levelno >= logging.ERROR]


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


def finish(engine: TinyEngine) -> None:
    """Lets all answers come to their ends, and checks each against a plain loop."""
    engine.finish()
    for asked in engine.requests:
        asked.check_answer()
    engine.check_cache()


def rounds_together(engine: TinyEngine) -> int:
    """The rounds of several answers."""
    return sum(rows > 1 and length > 1 for rows, length in engine.forward.calls)


def several(count: int, options: str, max_tokens: int = 24) -> list[RequestSpec]:
    """Requests of other lengths, half of them with other options."""
    others = [*OPTIONS]
    return [
        spec(options if place % 2 else others[place % len(others)], max_tokens, prompt=words(12 + 7 * place, place))
        for place in range(1, count + 1)
    ]


@pytest.mark.parametrize(("drafter", "options", "strategy", "count"), pairs(DRAFTERS, OPTIONS, STRATEGIES, COUNTS))
def test_each_answer_is_the_one_that_it_is_alone(drafter: str, options: str, strategy: str, count: str) -> None:
    all_at_once(drafter, several(int(count), options), strategy).check_drafts(strategy, int(count))


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


@pytest.mark.parametrize(
    ("grammar", "options", "strategy", "late", "drafter"),
    [
        *((*row, "qwen3_next") for row in pairs((DIGITS, FORCING), FORMATTED, STRATEGIES, ("0", "0 0 1", "0 3 0 9"))),
        *((DIGITS, "drawn", "random", "0", model) for model in TOGETHER),
    ],
)
def test_formats_look_ahead_for_each_of_them(
    grammar: str, options: str, strategy: str, late: str, drafter: str
) -> None:
    """Those whose masks are late do not hold up the others."""
    asked = [each._replace(eos=frozenset({EOS})) for each in several(4, options)]
    asked[::2] = [each._replace(grammar=grammar) for each in asked[::2]]
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


def test_a_third_answer_joins_two_that_are_drafted() -> None:
    engine = TinyEngine("llama")
    told(engine, "right")
    first = [engine.submit(each) for each in several(2, "greedy", 200)]
    engine.until(lambda: rounds_together(engine) > 3)
    late = engine.submit(spec("drawn", 60, prompt=words(20, 9)))
    engine.until(lambda: all(engine.phase(each) == "batch" for each in (*first, late)))
    before = rounds_together(engine)
    engine.until(lambda: rounds_together(engine) > before + 2)
    assert engine.forward.calls[-1][0] == 3
    finish(engine)


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
    with patch("runner.cache.layers.scans.RoundReads.known", False):
        engine.until(lambda: rounds_together(engine) > 0)
        finish(engine)
    assert rounds_together(engine) == 1


class Random(Told):
    """Drafts without knowing anything."""

    def __init__(self, shared: ToldTogether, seed: int) -> None:
        AnswerDrafter.__init__(self, shared, [])
        self.rounds = []
        self._numbers = random.Random(seed)

    def coming(self, session: Session, most: int) -> Sequence[int]:
        return [self._numbers.randrange(200) for _ in range(min(most, self._numbers.choice((0, 2, 5))))]


@pytest.mark.parametrize("name", ["qwen3.5-seeing", "gemma4-seeing"])
def test_answers_about_pictures_are_drafted_behind_their_own_positions(name: str) -> None:
    engine, shared = SeeingEngine(name), ToldTogether()
    drafters = list[Random]()

    def make(generation: Generation) -> Random:
        drafters.append(Random(shared, len(drafters)))
        return drafters[-1]

    engine.let_draft(shared, make)
    engine.ask("what is [img-0] here?", picture("red"), max_tokens=24, temperature=0.7, seed=3)
    engine.ask("and there is none", max_tokens=24)
    engine.ask("Look, with care, at that: [img-0] and say more", picture("red"), max_tokens=20, temperature=0.7, seed=5)
    engine.finish()
    engine.check()
    assert len(shared.rounds_together) > 3
    assert sum(bool(drafter.rounds) for drafter in drafters) == 3


# --- what is drafted


class Fixed(DraftPolicy):
    """Takes as many tokens as it was told."""

    def __init__(self, length: int) -> None:
        super().__init__(7)
        self.told = length
        self.asked = list[tuple[list[int], int]]()

    def lengths(self, drafts: Sequence[Draft], terms: Terms) -> Sequence[int]:
        self.asked.append(([len(draft.tokens) for draft in drafts], terms.together))
        return [self.told] * len(drafts)


def test_known_text_is_looked_up_for_each_row_and_one_that_has_none_is_padded() -> None:
    """Two prompts repeat themselves, and so do their answers; the third draws at random."""
    policy = Fixed(3)
    drafting = Drafting(policy)
    drafting.speed(3).record = lambda *_, **__: None  # type: ignore[method-assign]  # it would compare real times
    engine = TinyEngine("llama", drafting=drafting)
    asked: list[ClientRequest] = []
    for place in range(2):
        first = spec("greedy", 40, prompt=words(20, place))
        text = (*first.prompt, *oracle_answer("llama", first).tokens)
        asked.append(engine.submit(first._replace(prompt=(*text, *first.prompt))))
    asked.append(engine.submit(spec("drawn", 40, prompt=words(9, 7))))
    finish(engine)
    assert any(together == 3 for _, together in policy.asked)
    assert rounds_together(engine)
    assert max(length for rows, length in engine.forward.calls if rows > 1) <= 4


def test_one_in_eight_steps_is_measured_as_long_as_nothing_is_worth_a_draft() -> None:
    drafting, measured = Drafting(Fixed(0)), list[int]()
    record = drafting.record_time

    def note(drafters: list[AnswerDrafter], step: StepTime) -> None:
        measured.append(step.steps)
        record(drafters, step)

    drafting.record_time = note  # type: ignore[method-assign]
    engine = TinyEngine("llama", drafting=drafting)
    engine.submit(spec("greedy", 80, prompt=words(20) * 3))
    engine.finish()
    assert len(measured) > 5
    assert set(measured[1:]) == {8}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_four_requests_about_one_text_that_are_asked_again_take_few_forwards(name: str) -> None:
    """Their answers are paths of the cache."""
    drafting = Drafting(Fixed(7))
    drafting.speed(4).record = lambda *_, **__: None  # type: ignore[method-assign]  # it would compare real times
    engine, text, counts = TinyEngine(name, drafting=drafting), words(80), list[int]()
    asked = [spec("drawn", 64, prompt=(*text, *words(5 + 2 * place, place))) for place in range(4)]
    for _ in range(2):
        before = len(engine.forward.calls)
        for each in asked:
            engine.submit(each)
        finish(engine)
        counts.append(len(engine.forward.calls) - before)
    assert drafting.counts().accepted["path"] > 200
    assert counts[1] < counts[0] / 4


@pytest.mark.parametrize("model", TOGETHER)
def test_some_have_known_text_and_a_model_drafts_for_the_others(model: str) -> None:
    """Two prompts repeat themselves, and so do their answers, at first; the model reads on with them."""
    name, make = TOGETHER[model]
    kinds = ("greedy", "filtered", "greedy", "filtered")
    asked = [spec(kind, 40, prompt=words(12 + 7 * place, place)) for place, kind in enumerate(kinds)]
    for place in (0, 2):
        text = (*asked[place].prompt, *oracle_answer(name, asked[place]).tokens)
        asked[place] = asked[place]._replace(prompt=(*text, *asked[place].prompt))
    drafts = Righted(make(), name, "random", asked)
    drafting = Willing(drafts, length=4, known=3)
    engine = drafting.engine(name)
    for each in asked:
        engine.submit(each)
    engine.finish()
    for client in engine.requests:
        client.check_answer()
    engine.check_cache()
    assert drafting.counts().drafted["own"] > 10
    assert drafting.mixed > 0


# --- what each of them is drafted from


def from_scratch(drafter: DraftModel, name: str, text: list[int], count: int) -> list[int]:
    """The most probable drafts after a text, from one forward of the target over all of it."""
    layers, drafts = tiny(name).make_layers(), list[int]()
    if isinstance(drafter, BlockDrafter):
        target = tiny_drafts.tiny_target(name)
        return [best(row) for row in tiny_drafts.from_scratch(drafter.dflash, target, text, count)]
    if isinstance(drafter, OwnDraftModel):
        own = tiny(drafter.name)
        for _ in range(count):
            drafts.append(best(own.logits(mx.array([[*text, *drafts]]), own.make_layers())[0, -1]))
        return drafts
    assert isinstance(drafter, AssistantDrafter | HeadDrafter)
    tap = Tap([target_of(tiny_drafts.tiny_target(name)).norm], len(text))
    tap.turn(True)
    tiny(name).model(mx.array([text[:-1]]), cache=layers)
    hidden = tap.take_outputs()
    tap.turn(False)
    assert hidden is not None
    if isinstance(drafter, HeadDrafter):
        for _ in range(count):
            states = drafter.head.states(hidden, mx.array([[*text[1:], *drafts]]), drafter.head.make_layers())
            drafts.append(best(drafter.head.target.unembed(states)[0, -1]))
            hidden = mx.concatenate([hidden, states[:, -1:]], axis=1)
        return drafts
    hidden, position = hidden[:, -1:], mx.array([len(text) - 2])
    shared = read_shared(drafter.assistant.places, drafter.assistant.kinds, layers)
    for _ in range(count):
        last = mx.array([[drafts[-1] if drafts else text[-1]]])
        logits, hidden = drafter.assistant.step(last, hidden, shared, position)
        drafts.append(best(logits[0, 0]))
    return drafts


def best(logits: mx.array) -> int:
    return cast("int", mx.argmax(logits).item())


@pytest.mark.parametrize("model", TOGETHER)
def test_the_drafts_of_each_are_those_of_its_whole_text(model: str) -> None:
    """Other answers do not matter: two begin, a third joins, one leaves, and another joins."""
    name, make = TOGETHER[model]
    prompts = [words(count, seed) for seed, count in enumerate((14, 33, 21, 40), 1)]
    asked = [spec("greedy", tokens, prompt) for tokens, prompt in zip((60, 30, 60, 40), prompts, strict=True)]
    own = make()
    drafts = Righted(own, name, "random", asked)
    engine = Willing(drafts).engine(name)
    clients = [engine.submit(each) for each in asked[:2]]
    for each in asked[2:]:
        engine.until(lambda: max(drafts.proposed, default=0) == len(clients))
        engine.advance(5)
        clients.append(engine.submit(each))
    engine.until(lambda: clients[1].finished is not None)
    engine.finish()
    for client in clients:
        client.check_answer()
    assert max(drafts.proposed) > 2
    assert len(drafts.own) > 30
    for text, found in drafts.own[::3]:
        assert found == from_scratch(own, name, text, len(found))
