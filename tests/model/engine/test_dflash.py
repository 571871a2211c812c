"""An answer is the same with the drafts of a DFlash draft as without them, and so is what the cache keeps of it."""

import logging
import random

import mlx.core as mx
import pytest

from runner.cache.session import LiveSession
from runner.engine.draft_model.dflash_model import DFlashModel
from runner.sampling.sampler import Sampler
from scripts.tools.models.tiny import words
from tests.lib.tiny_engine import RandomPolicy, TinyEngine, oracle_answer
from tests.lib.told_drafts import OPTIONS, spec
from tests.model.dflash.tiny_drafts import tiny_draft
from tests.model.engine.test_draft_formats import GRAMMARS
from tests.model.engine.test_draft_model import Willing, conversation
from tests.model.engine.test_drafts import at_call

TARGETS = ("llama", "gemma3", "qwen3_next")


class Prompted(DFlashModel):
    """Drafts, and puts tokens that are right in place of the first ones of every other draft."""

    def __init__(self, target: str) -> None:
        super().__init__("a draft", tiny_draft(target))
        self._target = target
        self.answers: list[tuple[list[int], list[int]]] = []
        """Prompts, and what follows them."""
        self._count = 0

    def propose(self, session: LiveSession, most: int, sampler: Sampler) -> list[int]:
        own = super().propose(session, most, sampler)
        self._count += 1
        if self._count % 2:
            return own
        for prompt, answer in self.answers:
            if session.recorded[: len(prompt)] == prompt:
                return [*answer[len(session.recorded) - len(prompt) :][:2], *own[2:]][: len(own)]
        return own


def prompted(target: str, options: str, grammar: str = "") -> Prompted:
    """A model that knows something of the conversation's answers."""
    model, asked = Prompted(target), spec(options)._replace(grammar=grammar)
    first = oracle_answer(target, asked).tokens
    second = asked._replace(prompt=(*asked.prompt, *first, *words(7, 3)))
    for each in (second, asked):
        model.answers.append(([*each.prompt], oracle_answer(target, each).tokens))
    return model


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_drafts_blocks_change_nothing(name: str, options: str) -> None:
    model = prompted(name, options)
    drafting = Willing(model)
    assert conversation(name, options, drafting, watch=model.watch) == conversation(name, options, None)
    counts = drafting.counts
    assert counts.drafted["model"] > 20
    assert 0 < counts.accepted["model"] < counts.drafted["model"]
    assert counts.model is not None
    assert 0 < counts.model.bytes <= model.most_bytes


@pytest.mark.parametrize("grammar", ["digits", "anything", "nested"])
@pytest.mark.parametrize("name", TARGETS)
def test_a_format_is_followed_just_the_same(name: str, grammar: str) -> None:
    model = prompted(name, "drawn", GRAMMARS[grammar])
    drafting = Willing(model)
    found = conversation(name, "drawn", drafting, watch=model.watch, grammar=GRAMMARS[grammar])
    assert found == conversation(name, "drawn", None, grammar=GRAMMARS[grammar])
    assert drafting.counts.drafted["model"] > 0


@pytest.mark.parametrize("cache", ["single", "none"])
def test_every_cache_keeps_the_same(cache: str) -> None:
    model = prompted("gemma3", "drawn")
    wanted = conversation("gemma3", "drawn", None, cache)
    assert conversation("gemma3", "drawn", Willing(model), cache, watch=model.watch) == wanted


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TARGETS)
def test_one_draft_serves_answers_that_come_and_go(name: str, seed: int) -> None:
    """It turns from one to the other; some of them are cancelled, restart, are edited, or go on in a batch."""
    numbers, model = random.Random(seed), DFlashModel("a draft", tiny_draft(name))
    drafting = Willing(model)
    engine = TinyEngine(name, RandomPolicy(numbers), budget=600_000, parallel=4, watch=model.watch)
    engine.drafter = lambda client: drafting.drafter(client.spec.prompt)
    for number in range(10):
        prompt = (*words(numbers.choice((20, 70)), number % 3), *words(number % 5, 9))
        engine.submit(spec(numbers.choice([*OPTIONS]), numbers.randint(3, 16), prompt=prompt))
        engine.advance(numbers.randint(0, 25))
        if numbers.random() < 0.2:
            numbers.choice(engine.requests).request.cancel()
        if numbers.random() < 0.2:
            engine.forward.error = MemoryError
            engine.forward.breaks = at_call(numbers.randint(1, 3))
    engine.forward.breaks = lambda rows, length: False
    engine.finish()
    engine.check()
    assert drafting.counts.drafted["model"] > 10
    assert model.nbytes <= model.most_bytes


def test_a_long_prompt_is_read_in_parts_while_the_answer_goes_on() -> None:
    model = DFlashModel("a draft", tiny_draft("llama"))
    drafting = Willing(model)
    parts, reads = list[bool](), model.read
    engine = TinyEngine("llama", watch=model.watch)
    engine.drafter = lambda client: drafting.drafter(client.spec.prompt)

    def read(session: LiveSession, *, briefly: bool) -> bool:
        parts.append(reads(session, briefly=briefly))
        return parts[-1]

    model.read = read  # type: ignore[method-assign]
    asked = engine.submit(spec("greedy", 30, prompt=words(1000)))
    engine.until(lambda: parts.count(False) == 1)
    assert parts.count(True) in (7, 8)  # of 64 tokens, of the last 512
    assert len(asked.tokens) >= 8
    engine.finish()
    engine.check()


def test_for_a_single_try_a_short_end_of_the_text_is_read() -> None:
    model = DFlashModel("a draft", tiny_draft("llama"))
    drafting = Willing(model, length=1)
    engine = TinyEngine("llama", watch=model.watch)
    engine.drafter = lambda client: drafting.drafter(client.spec.prompt)
    engine.submit(spec("greedy", 10, prompt=words(1000)))
    engine.finish()
    engine.check()
    assert drafting.counts.drafted["model"] > 2
    assert model.drafter._context.stop - model.drafter._context.start <= 64 + 10


def test_a_draft_that_fails_costs_one_line_and_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    draft = tiny_draft("llama")
    calls = 0

    class Broken(type(draft.module)):  # type: ignore[misc]
        def __call__(self, *arguments: object) -> mx.array:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise RuntimeError("the draft is broken")
            return super().__call__(*arguments)  # type: ignore[no-any-return]

    draft.module.__class__ = Broken
    model = DFlashModel("a draft", draft)
    drafting = Willing(model)
    with caplog.at_level(logging.INFO):
        assert conversation("llama", "drawn", drafting, watch=model.watch) == conversation("llama", "drawn", None)
    assert [record.message for record in caplog.records if "draft model" in record.message] == [
        "the draft model failed; answers go on without it"
    ]
    assert calls == 3
    assert drafting.counts.model is not None
    assert drafting.counts.model.state == "off"
