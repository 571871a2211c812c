"""The sketch of a model, and the forwards before the first request: they leave nothing behind."""

from math import nan
from typing import cast

import mlx.core as mx
import pytest

from runner.assemble import sketch, warm_up
from runner.cache.sketch import Sketch
from runner.errors import ComputeError
from scripts.tools.models.tiny import KINDS, VOCAB, tiny
from tests.lib.driver import check_facts
from tests.lib.tiny_engine import CONTEXT, plain_forward

from mlx_lm.models.cache import KVCache  # isort: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_sketch_computes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large model the forwards would take seconds and memory for a token that is not needed."""
    kind = tiny(name)
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("evaluated"))
    monkeypatch.setattr(mx, "async_eval", lambda *_: pytest.fail("evaluated"))
    before = mx.get_active_memory()
    found = sketch(kind.make_layers, plain_forward(kind), VOCAB, CONTEXT)
    results = [found.forward(mx.array([tokens]), found.layers) for tokens in (found.prompt, [0])]
    assert [array.shape[:2] for array in results] == [(1, 16), (1, 1)]
    assert mx.get_active_memory() - before < results[0].nbytes, "not even the scores of the prompt"


@pytest.mark.parametrize("name", KINDS)
def test_a_sketch_shows_what_layers_hold_when_they_are_computed(name: str) -> None:
    check_facts(tiny(name))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_reads_a_prompt_and_draws_with_and_without_chance(name: str) -> None:
    kind = tiny(name)
    shapes: list[tuple[int, ...]] = []

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        shapes.append(tokens.shape)
        assert mx.max(tokens).item() < VOCAB  # type: ignore[operator]  # it is a number
        return plain_forward(kind)(tokens, layers)

    found = sketch(kind.make_layers, forward, VOCAB, CONTEXT)
    assert shapes == [(1, 16), (1, 1)]
    assert warm_up(found, found.forward, VOCAB, CONTEXT)
    assert shapes == [(1, 16), (1, 1)], "the sketch is computed, and nothing else"


def test_a_model_that_computes_no_numbers_is_told_from_others() -> None:
    kind = tiny("llama")

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        return plain_forward(kind)(tokens, layers) * nan

    found = Sketch(kind.make_layers, forward, VOCAB)
    assert not warm_up(found, found.forward, VOCAB, CONTEXT)


def failing(tokens: mx.array, layers: list[object]) -> mx.array:
    raise RuntimeError("no kernel for this")


def test_a_model_that_cannot_compute_is_refused() -> None:
    kind, why = tiny("llama"), r"^the model cannot compute: RuntimeError: no kernel for this$"
    with pytest.raises(ComputeError, match=why):
        sketch(kind.make_layers, failing, VOCAB, CONTEXT)
    with pytest.raises(ComputeError, match=why):
        warm_up(Sketch(kind.make_layers, kind.logits, VOCAB), failing, VOCAB, CONTEXT)


def test_a_layer_that_fills_only_with_more_tokens_is_found() -> None:
    """It has an entry for each group of tokens."""
    kind, group = tiny("llama"), 64
    lengths: list[int] = []

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        lengths.append(tokens.shape[1])
        if entries := tokens.shape[1] // group:
            cast("KVCache", layers[-1]).update_and_fetch(*2 * [mx.zeros((1, 1, entries, 8))])
        return kind.logits(tokens, layers[:-1])

    found = sketch(lambda: [*kind.make_layers(), KVCache()], forward, VOCAB, CONTEXT)
    last = len(kind.make_layers())
    assert found.facts.used == {*range(last + 1)}
    assert found.facts.untrusted == {last}
    assert found.facts.token_bytes == kind.facts.token_bytes
    assert lengths == [16, 1, min(512, CONTEXT)]
    assert warm_up(found, found.forward, VOCAB, CONTEXT)
    assert lengths[3:] == []


def test_a_layer_that_the_model_does_not_use_is_found() -> None:
    kind = tiny("llama")
    found = sketch(
        lambda: [*kind.make_layers(), KVCache()], lambda tokens, layers: kind.logits(tokens, layers[:-1]), VOCAB, 400
    )
    assert found.facts.used == {*range(len(kind.make_layers()))}
    assert not found.facts.untrusted


def test_a_model_that_names_no_context_is_sketched_too() -> None:
    kind = tiny("mamba2")
    assert len(sketch(kind.make_layers, plain_forward(kind), VOCAB, 0).prompt) == 16
