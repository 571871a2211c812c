"""A model drafts for several answers at once, and each of them is the same as alone and without drafts."""

import logging
import random
from collections.abc import Iterator, Sequence
from typing import cast

import mlx.core as mx
import pytest

from runner.drafts.assistant import AssistantDrafter, read
from runner.drafts.dflash.drafter import BlockDrafter
from runner.drafts.drafting import DraftModel
from runner.drafts.heads.head import HeadDrafter
from runner.drafts.own_model import OwnDraftModel
from runner.drafts.target import Tap, target_of
from scripts.tools.models.tiny import tiny, words
from tests.lib.pairs import pairs
from tests.lib.tiny_engine import RandomPolicy, RequestSpec, TinyEngine, at_call, oracle_answer, text_of
from tests.lib.told_drafts import EOS, OPTIONS, STRATEGIES, spec
from tests.model.drafts.dflash import tiny_drafts
from tests.model.drafts.models import TOGETHER, Righted, Willing

COUNTS = ("2", "3", "4", "8")


@pytest.fixture(autouse=True)
def _nothing_breaks(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A model that failed would be dropped, and a batch broken up: the answers would be right all the same."""
    yield
    if "memory" not in request.node.name:
        assert not [each.message for each in caplog.get_records("call") if each.levelno >= logging.ERROR]


def several(count: int, options: str, max_tokens: int = 24) -> list[RequestSpec]:
    """Requests of other lengths, half of them with other options."""
    others = [*OPTIONS]
    return [
        spec(options if place % 2 else others[place % len(others)], max_tokens, prompt=words(12 + 7 * place, place))
        for place in range(1, count + 1)
    ]


def all_at_once(
    name: str, model: DraftModel, asked: Sequence[RequestSpec], length: int = 4
) -> tuple[TinyEngine, Willing]:
    """Answers these together, and checks each against a plain loop."""
    drafting = Willing(model, length)
    engine = drafting.engine(name, eos=asked[0].eos)
    for each in asked:
        engine.submit(each)
    engine.finish()
    for client in engine.requests:
        client.check_answer()
    engine.check_cache()
    return engine, drafting


def rounds_together(engine: TinyEngine) -> int:
    return sum(rows > 1 and length > 1 for rows, length in engine.forward.calls)


@pytest.mark.parametrize(("model", "options", "strategy", "count"), pairs(TOGETHER, OPTIONS, STRATEGIES, COUNTS))
def test_each_answer_is_the_one_that_it_is_alone(model: str, options: str, strategy: str, count: str) -> None:
    name, make = TOGETHER[model]
    asked = several(int(count), options)
    drafts = Righted(make(), name, strategy, asked)
    engine, drafting = all_at_once(name, drafts, asked)
    counts = drafting.counts()
    if int(count) <= drafts.most_together:
        assert rounds_together(engine)
        assert max(drafts.proposed) > int(count) // 2
    assert strategy != "right" or counts.accepted["model"] == counts.drafted["model"] > 0
    assert strategy != "wrong" or not counts.accepted["model"]
    assert drafts.nbytes <= drafts.most_bytes(8)


@pytest.mark.parametrize("model", TOGETHER)
def test_right_drafts_of_four_answers_save_forwards(model: str) -> None:
    """Without drafts it takes 64 for 240 tokens, the four prompts among them."""
    name, make = TOGETHER[model]
    asked = several(4, "drawn", 60)
    engine, _ = all_at_once(name, Righted(make(), name, "right", asked), asked)
    assert len(engine.forward.calls) < 22


@pytest.mark.parametrize(("model", "place", "strategy"), pairs(TOGETHER, map(str, range(1, 8)), ("right", "random")))
def test_one_of_them_may_end_anywhere_in_a_round(model: str, place: str, strategy: str) -> None:
    """By an end-of-sequence token, a stop string, or its length; the others go on."""
    name, make = TOGETHER[model]
    tokens = int(place)
    for change in ("eos", "stop", "max_tokens"):
        asked = several(3, "drawn", 16)
        token = oracle_answer(name, asked[1]).tokens[tokens - 1]
        if change == "eos":
            asked = [each._replace(eos=frozenset({token})) for each in asked]
        elif change == "stop":
            asked[1] = asked[1]._replace(stop=text_of([token]))
        else:
            asked[1] = asked[1]._replace(max_tokens=tokens)
        all_at_once(name, Righted(make(), name, strategy, asked), asked)


@pytest.mark.parametrize("model", TOGETHER)
def test_answers_come_and_go_and_some_find_no_memory(model: str) -> None:
    name, make = TOGETHER[model]
    together = 0
    for seed in range(2):
        numbers, asked = random.Random(f"{model} {seed}"), list[RequestSpec]()
        drafts = Righted(make(), name, "random", asked)
        drafting = Willing(drafts)
        engine = drafting.engine(name, RandomPolicy(numbers), budget=2_000_000, parallel=5)
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
        assert drafts.nbytes <= drafts.most_bytes(8)
        together += rounds_together(engine)
        state = drafting.counts().model
        assert state is not None
        assert state.state == "on"
    assert together


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


def test_formats_look_ahead_for_each_of_them() -> None:
    for model, (name, make) in TOGETHER.items():
        asked = [each._replace(eos=frozenset({EOS})) for each in several(4, "drawn")]
        asked[::2] = [each._replace(grammar="start: /[0-9]{4,30}/") for each in asked[::2]]
        engine, _ = all_at_once(name, Righted(make(), name, "random", asked), asked)
        assert rounds_together(engine), model


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
    hidden = tap.take()
    tap.turn(False)
    assert hidden is not None
    if isinstance(drafter, HeadDrafter):
        for _ in range(count):
            states = drafter.head.states(hidden, mx.array([[*text[1:], *drafts]]), drafter.head.make_layers())
            drafts.append(best(drafter.head.target.unembed(states)[0, -1]))
            hidden = mx.concatenate([hidden, states[:, -1:]], axis=1)
        return drafts
    hidden, position = hidden[:, -1:], mx.array([len(text) - 2])
    shared = read(drafter.assistant.places, drafter.assistant.kinds, layers)
    for _ in range(count):
        last = mx.array([[drafts[-1] if drafts else text[-1]]])
        logits, hidden = drafter.assistant.step(last, hidden, shared, position)
        drafts.append(best(logits[0, 0]))
    return drafts


def best(logits: mx.array) -> int:
    return cast("int", mx.argmax(logits).item())


@pytest.mark.parametrize("model", TOGETHER)
def test_the_drafts_of_each_are_those_of_its_whole_text(model: str) -> None:
    """Whoever is drafted beside it: two begin, a third joins, one leaves, and another joins."""
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
