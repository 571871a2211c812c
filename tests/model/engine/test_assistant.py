"""An answer is the same with the drafts of an assistant as without them, and so is what the cache keeps of it."""

import random
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_map_with_path

import runner.process.lean_mlx_lm  # noqa: F401

from mlx_lm.models.gemma4_text import ModelArgs  # isort: skip

from runner.cache.session import LiveSession
from runner.engine.draft_model.assistant_model import AssistantModel
from runner.engine.drafting import Drafting
from runner.model.assistant.context import places_of
from runner.model.assistant.load import Assistant, check_target, load_assistant
from runner.model.assistant.module import AssistantModule
from runner.model.assistant.opening import Sizes
from runner.model.draft import open_draft
from runner.model.heads.target import target_of
from runner.sampling.sampler import Sampler
from scripts.tools.models.assistants import config_of
from scripts.tools.models.tiny import VOCAB, tiny, words
from tests.lib.seeing_engine import SeeingEngine, picture
from tests.lib.tiny_engine import RandomPolicy, TinyEngine
from tests.lib.told_drafts import EOS, OPTIONS, Seen, seen, spec
from tests.model.assistant.made import write
from tests.model.engine.test_draft_formats import GRAMMARS
from tests.model.engine.test_draft_model import Willing
from tests.model.engine.test_drafts import at_call

SIZES = {"every token": Sizes(32, 0, 0), "groups": Sizes(32, 16, 3)}
RED = picture("red")


class Noting(AssistantModel):
    """Notes how many tokens it drafted each time."""

    def __init__(self, assistant: Assistant) -> None:
        super().__init__("noting", assistant)
        self.lengths: list[int] = []

    def propose(self, session: LiveSession, most: int, sampler: Sampler) -> list[int]:
        drafts = super().propose(session, most, sampler)
        self.lengths.append(len(drafts))
        return drafts


def assistant(kind: str = "every token") -> Noting:
    """A random one for the tiny Gemma 4."""
    target = tiny("gemma4").model
    args = ModelArgs(
        hidden_size=48,
        num_hidden_layers=3,
        intermediate_size=64,
        num_attention_heads=2,
        head_dim=8,
        global_head_dim=16,
        vocab_size=VOCAB,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    mx.random.seed(3)
    module = AssistantModule(args, SIZES[kind], tied=True)
    module.update(
        tree_map_with_path(
            lambda _, fresh: mx.random.normal(fresh.shape, scale=fresh.shape[-1] ** -0.5) if fresh.ndim > 1 else fresh,
            module.parameters(),  # type: ignore[no-untyped-call]
        )
    )
    kinds = frozenset(args.layer_types or ())
    return Noting(Assistant(module, target_of(target), 32**0.5, places_of(target), kinds))  # type: ignore[arg-type]


def engine_of(model: Noting | None, **arguments: object) -> tuple[TinyEngine, Drafting | None]:
    if model is None:
        return TinyEngine("gemma4", **arguments), None  # type: ignore[arg-type]
    drafting = Willing(model)
    engine = TinyEngine("gemma4", watch=model.watch, **arguments)  # type: ignore[arg-type]
    engine.drafter = lambda client: drafting.drafter(client.spec.prompt)
    return engine, drafting


def conversation(options: str, model: Noting | None, cache: str = "trie", grammar: str = "") -> Seen:
    """An answer, one more turn behind it, and another one in place of a part of it."""
    engine, _ = engine_of(model, cache=cache, eos=frozenset({EOS}) if grammar else frozenset())
    asked = spec(options)._replace(grammar=grammar, eos=engine._eos)
    first = engine.submit(asked)
    engine.finish()
    for following in ((*asked.prompt, *first.tokens, *words(7, 3)), (*asked.prompt[:25], *words(70, 4))):
        engine.submit(asked._replace(prompt=following))
        engine.finish()
    engine.check()
    assert model is None or sum(model.lengths) > 0
    return seen(engine)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("options", OPTIONS)
def test_an_assistants_drafts_change_nothing(options: str, kind: str) -> None:
    model = assistant(kind)
    assert conversation(options, model) == conversation(options, None)
    assert len(model.lengths) > 30
    assert all(model.lengths)


@pytest.mark.parametrize("cache", ["single", "none"])
@pytest.mark.parametrize("options", ["greedy", "penalties"])
def test_every_cache_keeps_the_same(options: str, cache: str) -> None:
    model = assistant()
    assert conversation(options, model, cache) == conversation(options, None, cache)
    assert all(model.lengths)


@pytest.mark.parametrize(
    ("grammar", "options"),
    [
        ("forced text between", "log-probabilities"),
        ("anything", "greedy"),
        ("anything", "log-probabilities"),
    ],
)
def test_a_format_changes_nothing(grammar: str, options: str) -> None:
    found = [conversation(options, model, grammar=GRAMMARS[grammar]) for model in (assistant(), None)]
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(4))
def test_one_assistant_drafts_for_answers_that_come_and_go(seed: int) -> None:
    """Some of them are cancelled, restart, or go on in a batch."""
    numbers, model = random.Random(seed), assistant()
    engine, drafting = engine_of(model, schedule=RandomPolicy(numbers), budget=600_000, parallel=4)
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
    assert drafting is not None
    assert drafting.counts.drafted["model"] > 10
    assert drafting.counts.model is not None
    assert drafting.counts.model.state == "on"


def test_long_parts_of_a_prompt_are_not_kept() -> None:
    """No more than the model's `most_bytes` says."""
    model = assistant()
    engine, _ = engine_of(model)
    engine.submit(spec("greedy", 8, prompt=words(300)))
    most = 0
    while not engine.idle:
        engine.advance()
        most = max(most, model.nbytes)
    assert 0 < most <= model.most_bytes
    assert model.most_bytes == 2 * 80 * 32 * 4
    model.free()
    assert model.nbytes == 0


def asked_about_pictures(engine: SeeingEngine) -> list[Sequence[int]]:
    prompts = ("what is [img-0] here?", "what is [img-0] here? and there", "Look, with care, at that: [img-0]")
    return [engine.answer(prompt, RED, max_tokens=12, temperature=0.7, seed=3).tokens for prompt in prompts]


@pytest.mark.parametrize("name", ["gemma4-seeing", "gemma4-unified-seeing"])
def test_a_prompt_may_have_pictures(name: str, tmp_path: Path) -> None:
    """The engine's own check compares each answer with a plain loop."""
    plain = SeeingEngine(name)
    seeing = plain.model
    opened = open_draft(str(write(tmp_path / "assistant", config_of())), tmp_path)
    check_target(opened, seeing.opened, seeing.loaded.module)
    model = Noting(load_assistant(opened, seeing.loaded))
    drafting = Willing(model)
    engine = SeeingEngine(name, drafting=drafting, watch=model.watch)
    assert asked_about_pictures(engine) == asked_about_pictures(plain)
    engine.check()
    assert drafting.counts.drafted["model"] > 20
    assert all(model.lengths)
