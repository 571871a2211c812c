"""Logits that are no numbers end the request that they are of, and no other; the cache keeps nothing of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, nan
from typing import cast
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.utils import tree_flatten

from runner.drafts.own_model import OwnDraftModel
from runner.engine.events import Failed, Scored, Text
from runner.engine.generation import Forward
from runner.errors import NO_NUMBERS
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import KINDS, VOCAB, Tiny, tiny, words
from tests.lib.tiny_engine import BATCHABLE, ClientRequest, RequestSpec, TinyEngine, oracle_answer, plain_forward
from tests.lib.told_drafts import MOST, OPTIONS, Strategy, told
from tests.model.drafts.models import TOGETHER, Willing

PLACE = 5
"""The token whose logit is damaged."""
VALUES: dict[str, list[float]] = {
    "NaN": [nan if token == PLACE else 0.0 for token in range(VOCAB)],
    "infinity": [inf if token == PLACE else 0.0 for token in range(VOCAB)],
    "all closed": [-inf] * VOCAB,
}
CLOSED = [-inf if token == PLACE else 0.0 for token in range(VOCAB)]
WAYS: Mapping[str, Mapping[str, object]] = {
    **OPTIONS,
    "greedy with log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "top-k": {"temperature": 0.8, "seed": 3, "top_k": 9, "top_p": 0.9},
    "scores": {"candidates": (1, 2)},
}


def damaging(engine: TinyEngine) -> dict[ClientRequest, list[float]]:
    """Returns what the test wants to have added to the logits of requests that decode, from then on."""
    forward, added = engine.parts.forward, dict[ClientRequest, list[float]]()

    def damaged(tokens: mx.array, layers: list[object]) -> mx.array:
        logits = forward(tokens, layers)
        for batch in engine.scheduler.batches.all:
            if batch.rows.layers is layers:
                clients = [cast("ClientRequest", each.request.stream) for each in batch.generations]
                logits += mx.array([added.get(each, [0.0] * VOCAB) for each in clients])[:, None]
        return logits

    engine.parts.forward = damaged
    return added


def spec(way: str, max_tokens: int = 20, seed: int = 1, grammar: str = "") -> RequestSpec:
    options = SamplingOptions(**WAYS[way])  # type: ignore[arg-type]  # names and types are the struct's own
    return RequestSpec((*words(12, seed),), 1 if options.candidates else max_tokens, options, grammar=grammar)


def check_failed(asked: ClientRequest) -> None:
    """Checks that the client has read nothing wrong, and the error once, at the end."""
    *before, end = asked.received
    assert end == Failed(NO_NUMBERS)
    assert not any(isinstance(event, Failed | Scored) for event in before)
    assert asked.tokens == oracle_answer(asked.kind.name, asked.spec).tokens[: len(asked.tokens)]
    entries = [entry for event in before if isinstance(event, Text) for entry in event.logprobs]
    assert all(entry.logprob == entry.logprob for entry in entries)


@pytest.mark.parametrize("value", VALUES)
def test_an_answer_ends_with_an_error_and_the_next_one_is_right(value: str) -> None:
    for way in WAYS:
        engine = TinyEngine("llama", first_tokens=True)
        added = damaging(engine)
        asked = engine.submit(spec(way))
        added[asked] = VALUES[value]
        engine.finish()
        check_failed(asked)
        assert not asked.tokens
        assert engine.journal.outcomes == {"failed": 1}
        again = engine.submit(spec(way))
        engine.finish()
        assert again.finished is not None
        assert again.cached == 0, "nothing is kept of it"
        assert not engine.journal.known, "nor its first token"
        if way != "scores":
            again.check_answer()
        engine.check_cache()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("drafts", ["", "right", "random"])
def test_a_row_ends_and_its_neighbours_are_right(value: str, drafts: str) -> None:
    for grammar in ("", "start: /[!-~]{40}/"):
        engine = TinyEngine("llama")
        if drafts:
            told(engine, drafts)
        check_three(engine, VALUES[value], grammar)


def check_three(engine: TinyEngine, added: list[float], grammar: str = "") -> None:
    """Answers three requests in one batch, of which one ends because of what is added to its logits."""
    damaged, ways = damaging(engine), ("greedy", "drawn", "log-probabilities")
    asked = [engine.submit(spec(way, 24, seed, grammar)) for seed, way in enumerate(ways)]
    engine.until(lambda: all(engine.phase(each) == "batch" and each.tokens for each in asked))
    damaged[asked[1]] = added
    engine.finish()
    check_failed(asked[1])
    assert asked[1].tokens, "what came before is delivered"
    for each in (asked[0], asked[2]):
        each.check_answer()
    engine.check_cache()


@pytest.mark.parametrize("model", TOGETHER)
def test_a_row_ends_beside_others_that_a_model_drafts_for(model: str) -> None:
    name, make = TOGETHER[model]
    drafting = Willing(make())
    check_three(drafting.engine(name), VALUES["NaN"])
    assert drafting.drafted


def test_a_draft_model_without_numbers_costs_drafts_and_no_answer() -> None:
    draft = tiny("llama")
    model = OwnDraftModel("broken", draft.make_layers, lambda *each: plain_forward(draft)(*each) * nan, VOCAB)
    drafting = Willing(model)
    engine = drafting.engine("llama")
    asked = [engine.submit(spec(way, 20, seed)) for seed, way in enumerate(("greedy", "drawn"))]
    engine.finish()
    for each in asked:
        each.check_answer()
    assert drafting.drafted


def test_tokens_may_be_closed() -> None:
    """Some models close tokens with -inf, as grammars do."""
    engine = TinyEngine("llama")
    added = damaging(engine)
    for way in WAYS:
        asked = engine.submit(spec(way))
        added[asked] = CLOSED
        engine.finish()
        assert asked.finished is not None
        assert PLACE not in asked.tokens
    engine.check_cache()


# A token that the model makes NaN of: no answer without it may notice.


@contextmanager
def nan_of(token: int) -> Iterator[None]:
    """Makes NaN of the embedding of a token."""
    plain = cast("Callable[..., mx.array]", Embedding.__call__)

    def call(self: Embedding, tokens: mx.array) -> mx.array:
        return mx.where((tokens == token)[..., None], nan, plain(self, tokens))

    with patch.object(Embedding, "__call__", call):
        yield


def specs_without(name: str, token: int, wanted: Sequence[int]) -> list[RequestSpec]:
    """Requests without a token, in prompt and answer, whose prompts have so many tokens."""
    ways, found = [*OPTIONS], list[RequestSpec]()
    for seed in range(1, 100):
        prompt = tuple(words(wanted[len(found)], seed))
        each = RequestSpec(prompt, 16, spec(ways[len(found) % 3]).options)
        if token not in (*each.prompt, *oracle_answer(name, each).tokens):
            found.append(each)
        if len(found) == len(wanted):
            return found
    raise AssertionError("there are none")


@pytest.mark.parametrize("name", BATCHABLE)
def test_a_wrong_draft_that_becomes_nan_changes_no_answer(name: str) -> None:
    """Attention multiplies what it must not look at by 0, which NaN survives: in the round, and in the columns that
    shorter rows leave behind it."""
    engine, token = TinyEngine(name), 9
    asked = [engine.submit(each) for each in specs_without(name, token, (20, 31, 26))]
    told(engine, Strategy(lambda coming, numbers: [each if numbers.random() < 0.8 else token for each in coming]))
    with nan_of(token):
        engine.finish()
    for each in asked:
        each.check_answer()
    rounds = [rows for rows, length in engine.forward.calls if length in range(2, MOST + 2)]
    assert len(rounds) > 1, "answers go on with drafts until one becomes NaN"
    engine.check_cache()


def test_an_answer_one_of_whose_drafts_becomes_nan_has_no_more_of_them() -> None:
    engine, token = TinyEngine("llama"), 9
    (each,) = specs_without("llama", token, (1,))
    asked = engine.submit(each)
    told(engine, Strategy(lambda coming, _: [token for _ in coming]))
    with nan_of(token):
        engine.until(lambda: (1, MOST + 1) in engine.forward.calls)
        assert asked.session is not None
        assert not any(mx.isnan(x).any() for x in asked.session.state()), "a compiled step would read it"
        engine.finish()
    asked.check_answer()
    assert [length for _, length in engine.forward.calls if length > 1] == [MOST + 1]


@pytest.mark.parametrize("name", BATCHABLE)
def test_who_takes_the_place_of_an_answer_that_became_nan_is_right(name: str) -> None:
    engine = TinyEngine(name)
    ends = RequestSpec((*words(70, 2),), 16, spec("drawn").options)
    token = oracle_answer(name, ends).tokens[8]
    first, second, later = specs_without(name, token, (60, 65, 50))
    asked = [engine.submit(each) for each in (first, ends, second)]
    with nan_of(token):
        engine.until(lambda: asked[1].failed)
        assert engine.phase(asked[0]) == "batch"
        asked.append(engine.submit(later))
        engine.until(lambda: engine.phase(asked[3]) == "batch")
        engine.finish()
    check_failed(asked.pop(1))
    for each in asked:
        each.check_answer()
    engine.check_cache()


@contextmanager
def _without_numbers(kind: Tiny) -> Iterator[None]:
    """Makes NaN of the embeddings: whatever is computed meanwhile is none, and so is all that follows from it."""
    module = cast("Module", kind.model)
    held = {
        name: array
        for name, array in cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))
        if "embed" in name
    }
    module.load_weights([(name, mx.full(array.shape, nan)) for name, array in held.items()], strict=False)
    try:
        yield
    finally:
        module.load_weights([*held.items()], strict=False)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("call", [1, 2])
def test_the_cache_keeps_nothing_of_a_prompt_that_became_no_numbers(name: str, call: int) -> None:
    """A checkpoint that held them would spoil each later answer to the same beginning."""
    engine = TinyEngine(name, watch=lambda forward: lambda tokens, layers: watched(forward, tokens, layers))
    calls: list[int] = []

    def watched(forward: Forward, tokens: mx.array, layers: list[object]) -> mx.array:
        calls.append(tokens.shape[1])
        if len(calls) != breaks_at:
            return forward(tokens, layers)
        with _without_numbers(engine.kind):
            return forward(tokens, layers)

    breaks_at = 0
    before = engine.ask(words(40), 4)
    engine.finish()
    breaks_at = len(calls) + call
    asked = engine.ask([*words(40), *words(100, 2)], 4)
    engine.finish()
    assert asked.received[-1] == Failed(NO_NUMBERS)
    again = engine.ask([*words(40), *words(100, 2)], 4)
    other = engine.ask([*words(40), *words(30, 3)], 4)
    engine.finish()
    for each in (before, again, other):
        each.check_answer()
    state = name in ("mamba2", "deepseek_v41")  # copies, which do not go with the layers
    assert again.cached == other.cached == (36 if state else 0), "others have computed that"
    engine.check_cache()


def test_a_step_evaluates_as_often_as_before() -> None:
    """One dispatch of a step, which has all that is read of it."""
    engine = TinyEngine("llama")
    calls: list[str] = []

    def counted(name: str) -> Callable[..., None]:
        plain = cast("Callable[..., None]", getattr(mx, name))

        def call(*arrays: object) -> None:
            calls.append(name)
            plain(*arrays)

        return call

    asked = [engine.ask(words(20, seed), 30) for seed in range(3)]
    engine.until(lambda: all(engine.phase(each) == "batch" and len(each.tokens) > 3 for each in asked))
    steps = len(asked[0].tokens)
    with patch.object(mx, "eval", counted("eval")), patch.object(mx, "async_eval", counted("async_eval")):
        engine.until(lambda: len(asked[0].tokens) == steps + 10)
    assert calls == ["async_eval"] * 10
