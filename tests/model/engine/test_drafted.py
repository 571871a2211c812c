"""Drafts and their sources: known text, or a model that reads each text."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import pytest

from runner.drafts.assistant import AssistantDrafter, read_shared
from runner.drafts.dflash.drafter import BlockDrafter
from runner.drafts.draft_policy import Draft, DraftPolicy, Terms
from runner.drafts.drafting import AnswerDrafter, DraftedAnswer, Drafting, DraftModel, StepTime
from runner.drafts.heads.head import HeadDrafter
from runner.drafts.own_model import OwnDraftModel
from runner.drafts.target import Tap, target_of
from scripts.tools.models.tiny import tiny, words
from tests.lib.tiny_engine import ClientRequest, TinyEngine, oracle_answer
from tests.lib.told_drafts import spec
from tests.model.drafts.dflash import tiny_drafts
from tests.model.drafts.heads import test_drafter as heads
from tests.model.drafts.models import MODELS, TOGETHER, Righted, Willing, finish, own_model, rounds_together


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
    """A draft is tried now and then even if drafts do not pay. That must not cost the reading of every prompt."""
    model = own_model("llama")
    lengths = noted_lengths(model)
    drafting = Willing(model, length=1)
    engine = drafting.engine("llama")
    engine.submit(spec("greedy", 10, prompt=words(1000)))
    engine.finish()
    engine.check()
    assert drafting.drafted > 2
    assert sum(lengths) <= 64


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
    if isinstance(drafter, HeadDrafter):
        return heads.from_scratch(heads.Pair(tiny_drafts.tiny_target(name), drafter.head), text, count)
    assert isinstance(drafter, AssistantDrafter)
    tap = Tap([target_of(tiny_drafts.tiny_target(name)).norm], len(text))
    _, hidden = tap.observe(lambda: tiny(name).model(mx.array([text[:-1]]), cache=layers))
    assert hidden is not None
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
