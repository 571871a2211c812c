"""An answer is the same with the drafts of a model as without them, whatever the model is, and so is what the cache
keeps of it."""

import logging
import random
from collections.abc import Callable

import mlx.core as mx
import pytest

from runner.cache.session import LiveSession
from runner.drafts.draft import Draft
from runner.drafts.policy import DraftPolicy
from runner.engine.draft_model.interface import DraftModel, Forward
from runner.engine.draft_model.own_model import OwnDraftModel
from runner.engine.drafting import Drafting
from runner.engine.trial import SettledTrial
from runner.errors import ModelError
from runner.sampling.sampler import Sampler
from scripts.tools.models.tiny import VOCAB, tiny, words
from tests.lib.tiny_engine import RandomPolicy, TinyEngine, plain_forward
from tests.lib.told_drafts import DRAFTABLE, OPTIONS, UNMARKABLE, Seen, seen, spec
from tests.model.engine.test_drafts import at_call

TARGETS = ("llama", "gemma3", "qwen3_next")


class Eager(DraftPolicy):
    """Always lets the model draft, by itself, as many tokens as this."""

    def __init__(self, length: int = 4) -> None:
        super().__init__(7, [1.0] * 8)
        self._drafts = length

    def length(self, draft: Draft, context_tokens: int) -> int:
        return 0

    def model_length(self, most: int, context_tokens: int) -> int:
        return min(most, self._drafts)


class Willing(Drafting):
    """Drafts whatever the clock says."""

    def __init__(self, model: DraftModel, length: int = 4) -> None:
        super().__init__(Eager(length), SettledTrial(), model=model)
        assert self.model is not None
        self.model.guard.took = lambda *_, **__: None  # type: ignore[method-assign]  # it would compare real times


def own_model(kind: str, vocab_size: int = VOCAB) -> OwnDraftModel:
    return OwnDraftModel(kind, tiny(kind).make_layers, plain_forward(tiny(kind)), vocab_size)


class Stranger:
    """Drafts tokens at random, some of them beyond the vocabulary."""

    name = "stranger"
    at_once = False
    nbytes = 0

    def __init__(self) -> None:
        self._numbers = random.Random(3)

    def read(self, session: LiveSession, *, briefly: bool) -> bool:
        return self._numbers.random() < 0.2

    def propose(self, session: LiveSession, most: int, sampler: Sampler) -> list[int]:
        return [self._numbers.randint(-1, VOCAB) for _ in range(self._numbers.randint(0, most))]

    def free(self) -> None: ...


class Broken(Stranger):
    """Raises, after a while."""

    def __init__(self, where: str, calls: int) -> None:
        super().__init__()
        self._where, self._calls = where, calls
        self.freed = False

    def read(self, session: LiveSession, *, briefly: bool) -> bool:
        self._count("read")
        return False

    def propose(self, session: LiveSession, most: int, sampler: Sampler) -> list[int]:
        self._count("propose")
        return [1] * most

    def _count(self, where: str) -> None:
        if where == self._where:
            self._calls -= 1
            assert self._calls >= 0, "used again"
            if not self._calls:
                raise RuntimeError("the model is broken")

    def free(self) -> None:
        self.freed = True


def conversation(
    name: str,
    options: str,
    drafting: Drafting | None,
    cache: str = "trie",
    watch: Callable[[Forward], Forward] = lambda forward: forward,
    grammar: str = "",
) -> Seen:
    """An answer, and one more turn behind it."""
    engine = TinyEngine(name, cache=cache, watch=watch)
    if drafting is not None:
        engine.drafter = lambda client: drafting.drafter(client.spec.prompt)
    asked = spec(options)._replace(grammar=grammar)
    first = engine.submit(asked)
    engine.finish()
    engine.submit(asked._replace(prompt=(*asked.prompt, *first.tokens, *words(7, 3))))
    engine.finish()
    engine.check()
    return seen(engine)


MODELS: dict[str, Callable[[str], DraftModel]] = {
    "itself": own_model,
    "another": lambda name: own_model("llama" if name != "llama" else "gemma3"),
    "a stranger": lambda _: Stranger(),
    "one that cannot read": lambda _: Broken("read", 5),
    "one that cannot draft": lambda _: Broken("propose", 3),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_models_drafts_change_nothing(name: str, options: str, model: str) -> None:
    drafting = Willing(MODELS[model](name))
    assert conversation(name, options, drafting) == conversation(name, options, None)
    assert drafting.counts.drafted["model"] > 0


@pytest.mark.parametrize("cache", ["single", "none"])
def test_every_cache_keeps_the_same(cache: str) -> None:
    wanted = conversation("gemma3", "drawn", None, cache)
    assert conversation("gemma3", "drawn", Willing(own_model("gemma3")), cache) == wanted


@pytest.mark.parametrize("options", ["greedy", "drawn", "filtered", "penalties"])
@pytest.mark.parametrize("name", DRAFTABLE)
def test_a_model_that_is_the_answers_own_is_always_right(name: str, options: str) -> None:
    """It draws with the same numbers, filters and penalties, and goes back to where it should."""
    if name == "quantized":
        pytest.skip("its keys and values are rounded otherwise when they come one by one")
    drafting = Willing(own_model(name))
    conversation(name, options, drafting)
    counts = drafting.counts
    assert counts.accepted["model"] == counts.drafted["model"] > 20
    assert counts.model is not None
    assert counts.model.bytes > 0


def test_a_model_that_fails_is_not_used_again_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Broken("propose", 3)
    drafting = Willing(model)
    with caplog.at_level(logging.INFO):
        conversation("llama", "drawn", drafting)
    assert [record.message for record in caplog.records if "draft model" in record.message] == [
        "the draft model failed; answers go on without it"
    ]
    assert model.freed
    assert drafting.counts.model is not None
    assert drafting.counts.model.state == "off"
    assert "RuntimeError" in drafting.counts.model.why
    assert drafting.counts.state == "on"  # what is known is still drafted


@pytest.mark.parametrize("kind", UNMARKABLE)
def test_a_model_that_cannot_go_back_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match="there is no way back in its LayerCache"):
        own_model(kind)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", TARGETS)
def test_one_model_drafts_for_answers_that_come_and_go(name: str, seed: int) -> None:
    """It turns from one to the other; some of them are cancelled, restart, or go on in a batch."""
    numbers, drafting = random.Random(seed), Willing(own_model(name))
    engine = TinyEngine(name, RandomPolicy(numbers), budget=600_000, parallel=4)
    engine.drafter = lambda client: drafting.drafter(client.spec.prompt)
    for number in range(10):
        prompt = (*words(numbers.choice((20, 70)), number % 3), *words(number % 5, 9))
        engine.submit(spec(numbers.choice([*OPTIONS]), numbers.randint(3, 30), prompt=prompt))
        engine.advance(numbers.randint(0, 25))
        if numbers.random() < 0.2:
            numbers.choice(engine.requests).request.cancel()
        if numbers.random() < 0.2:
            engine.forward.error = MemoryError
            engine.forward.breaks = at_call(numbers.randint(1, 3))
    engine.forward.breaks = lambda rows, length: False
    engine.finish()
    engine.check()
    counts = drafting.counts
    assert counts.drafted["model"] > 10
    assert counts.accepted["model"] > counts.drafted["model"] / 2  # some of the answers ended inside a round


def test_a_long_prompt_is_read_in_parts_while_the_answer_goes_on() -> None:
    model = own_model("llama")
    parts, reads = list[bool](), model.read
    engine, drafting = TinyEngine("llama"), Willing(model)
    engine.drafter = lambda client: drafting.drafter(client.spec.prompt)

    def read(session: LiveSession, *, briefly: bool) -> bool:
        parts.append(reads(session, briefly=briefly))
        return parts[-1]

    model.read = read  # type: ignore[method-assign]
    asked = engine.submit(spec("greedy", 30, prompt=words(1000)))
    engine.until(lambda: parts.count(False) == 1)
    assert parts.count(True) in (11, 12)  # 8 steps, and parts of 64 tokens until 256 are read
    assert len(asked.tokens) >= 12
    engine.finish()
    engine.check()


def test_for_a_short_answer_to_a_long_prompt_nothing_is_read() -> None:
    model = own_model("llama")
    lengths, compute = list[int](), model._reader._forward

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        lengths.append(tokens.shape[1])
        return compute(tokens, layers)

    model._reader._forward = forward
    engine, drafting = TinyEngine("llama"), Willing(model)
    engine.drafter = lambda client: drafting.drafter(client.spec.prompt)
    for prompt, reads in ((words(1000), False), (words(40, 3), True)):
        lengths.clear()
        engine.submit(spec("greedy", 8, prompt=prompt))
        engine.finish()
        assert bool(lengths) == reads
    engine.check()


def test_for_a_single_try_a_short_end_of_the_text_is_read() -> None:
    """Where drafts do not pay, one is tried now and then: that must not cost the reading of every prompt."""
    model = own_model("llama")
    lengths, compute = list[int](), model._reader._forward

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        lengths.append(tokens.shape[1])
        return compute(tokens, layers)

    model._reader._forward = forward
    drafting = Willing(model, length=1)
    engine = TinyEngine("llama")
    engine.drafter = lambda client: drafting.drafter(client.spec.prompt)
    engine.submit(spec("greedy", 10, prompt=words(1000)))
    engine.finish()
    engine.check()
    assert drafting.counts.drafted["model"] > 2
    assert sum(lengths) <= 64
