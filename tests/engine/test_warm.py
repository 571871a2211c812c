"""The first forwards before the first request: they leave nothing behind, and nothing depends on them."""

import logging

import mlx.core as mx
import pytest

from runner.engine.warm import warm_up
from tests.cache.tiny import KINDS, VOCAB, tiny
from tests.engine.company import CONTEXT, plain


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_reads_a_prompt_and_draws_with_and_without_chance(name: str) -> None:
    kind = tiny(name)
    shapes: list[tuple[int, ...]] = []

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        shapes.append(tokens.shape)
        assert mx.max(tokens).item() < VOCAB  # type: ignore[operator]  # it is a number
        return plain(kind)(tokens, layers)

    warm_up(kind.make_layers, forward, VOCAB, CONTEXT)
    assert shapes == [(1, 16), (1, 1), (1, 1)]


def test_a_context_of_a_few_tokens_is_not_exceeded() -> None:
    kind = tiny("llama")
    seen: list[int] = []

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        seen.append(tokens.size)
        return plain(kind)(tokens, layers)

    warm_up(kind.make_layers, forward, VOCAB, 3)
    assert seen[0] == 3


def test_what_is_tried_comes_last_and_its_fault_is_only_told(caplog: pytest.LogCaptureFixture) -> None:
    kind = tiny("llama")
    done: list[str] = []

    def trial() -> None:
        done.append("tried")
        raise RuntimeError("no kernel for a batch")

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        assert not done
        return plain(kind)(tokens, layers)

    with caplog.at_level(logging.WARNING):
        warm_up(kind.make_layers, forward, VOCAB, CONTEXT, trial)
    assert done == ["tried"]
    assert "the model could not be warmed up" in caplog.text


def test_a_model_that_fails_is_told_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        raise RuntimeError("no kernel for this")

    with caplog.at_level(logging.WARNING):
        warm_up(tiny("llama").make_layers, forward, VOCAB, CONTEXT)
    assert "the model could not be warmed up" in caplog.text
