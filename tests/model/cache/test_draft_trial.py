"""The trial that finds out if a model may draft: models that may, models that may not, and faulty ones."""

from collections.abc import Callable
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.cache.layers.adapter import LayerState
from runner.cache.layers.batched import BatchedLayers
from runner.cache.layers.kv import KVState
from runner.cache.layers.scans import StateReads
from runner.cache.layers.states import RecurrentState
from runner.cache.layers.window import ChunkState, WindowState
from runner.commands.check.trial import draft_fault, rounds_fault
from scripts.tools.models.architectures import build
from scripts.tools.models.tiny import KINDS, VOCAB, Tiny, tiny

Forward = Callable[[mx.array, list[object]], mx.array]


def fault(model: Tiny, forward: Forward | None = None) -> str:
    return draft_fault(model.make_layers, forward or model.logits, VOCAB)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_that_can_go_back_may_draft(kind: str) -> None:
    assert fault(tiny(kind)) == ("LayerCache cannot go back" if kind == "deepseek_v41" else "")


@pytest.mark.parametrize(
    ("kind", "state"),
    [("llama", KVState), ("gemma3", WindowState), ("llama4", ChunkState), ("qwen3_next", RecurrentState)],
)
def test_a_layer_that_does_not_go_back_is_found(kind: str, state: type[LayerState]) -> None:
    """It says that it has, and holds what it held."""
    revert = state.revert

    def forget(self: LayerState, *args: object) -> None:
        layer = vars(self)["layer"]
        before = dict(vars(layer))
        revert(self, *args)  # type: ignore[arg-type]
        vars(layer).update(before)

    with patch.object(state, "revert", forget):
        assert fault(tiny(kind)) != ""


def test_a_model_that_sees_what_follows_is_found() -> None:
    right = tiny("llama").logits

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        logits = right(tokens, layers)
        return logits + 0.01 * mx.where(tokens[:, -1:] < VOCAB // 2, 1, -1) * logits if tokens.shape[1] > 1 else logits

    assert fault(tiny("llama"), forward).startswith("drafts change the logits before them by 0.0")


def test_what_follows_counts_by_itself() -> None:
    """All rows of a round are right, and nothing behind it."""
    right, model = tiny("llama").logits, tiny("llama")
    last = 0

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        nonlocal last
        logits = right(tokens, layers)
        length, seen = tokens.shape[1], vars(layers[0])["offset"]
        behind = length == 1 and seen <= last
        last = max(last, seen) if length == 5 else last
        return -logits if behind else logits

    assert "off by" in fault(model, forward)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_next"])
@pytest.mark.parametrize("known", [True, False])
def test_a_trial_is_cheap(kind: str, *, known: bool) -> None:
    """If the states within a round are unknown, right tokens are read again. A sketch of 17 tokens is not computed."""
    model, redone = tiny(kind), 2 * (kind == "qwen3_next" and not known)
    counts: list[int] = []

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        counts.append(tokens.shape[1])
        return model.logits(tokens, layers)

    with patch.object(StateReads, "known", StateReads.known if known else False):
        assert fault(model, forward) == ""
    assert sorted(counts) == [1] * 17 + [2] * redone + [3] * 4 + [5] * 4 + [16] * 5


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("wrong", ["the right tokens of another row", "one token more", "nothing"])
def test_rows_that_do_not_stand_after_what_is_right_are_found(kind: str, wrong: str) -> None:
    model, accept = tiny(kind), BatchedLayers.accept
    changed: dict[str, Callable[[list[int]], list[int]]] = {
        "the right tokens of another row": lambda counts: counts[::-1],
        "one token more": lambda counts: [count + 1 for count in counts],
        "nothing": lambda counts: [0 for _ in counts],
    }
    assert rounds_fault(model.make_layers, model.logits, VOCAB) == ""
    with patch.object(BatchedLayers, "accept", lambda self, counts: accept(self, changed[wrong]([*counts]))):
        assert "off by" in rounds_fault(model.make_layers, model.logits, VOCAB)


def test_a_row_that_sees_the_drafts_of_another_is_found() -> None:
    right = tiny("llama").logits

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        logits = right(tokens, layers)
        return logits[::-1] if tokens.shape[0] > 1 and tokens.shape[1] > 1 else logits

    assert "off by" in rounds_fault(tiny("llama").make_layers, forward, VOCAB)


def test_layers_whose_rows_cannot_go_back_by_themselves_are_no_fault() -> None:
    model = build("jamba")
    assert rounds_fault(model.make_layers, model.logits, VOCAB) == ""
    assert rounds_fault(tiny("llama4").make_layers, tiny("llama4").logits, VOCAB) == ""
