"""The forwards before the first request: they leave nothing behind, and nothing depends on them."""

from collections.abc import Callable
from math import nan

import mlx.core as mx
import pytest

from runner.assemble import sketch, warm_up
from runner.cache import make_cache
from runner.errors import ComputeError
from scripts.tools.models.tiny import KINDS, VOCAB, Tiny, tiny
from tests.lib.tiny_engine import CONTEXT, plain_forward


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_reads_a_prompt_and_draws_with_and_without_chance(name: str) -> None:
    kind = tiny(name)
    shapes: list[tuple[int, ...]] = []

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        shapes.append(tokens.shape)
        assert mx.max(tokens).item() < VOCAB  # type: ignore[operator]  # it is a number
        return plain_forward(kind)(tokens, layers)

    facts, from_numbers = warm_up(kind.make_layers, forward, VOCAB, CONTEXT)
    assert from_numbers
    assert shapes == [(1, 16), (1, 1), (1, 1)]
    assert [facts.bytes_of(tokens) for tokens in LENGTHS] == taken(kind, 16, 1, 1)


def taken(kind: Tiny, *forwards: int) -> list[int]:
    """Returns what a cache finds that sessions of some lengths take, after one with forwards over so many tokens."""
    trie = make_cache("trie", kind.make_layers)
    session = trie.begin(list(range(sum(forwards))))
    for count in forwards:
        start = session.position
        with session.forward(count):
            plain_forward(kind)(mx.array([session.recorded[start : start + count]]), session.layers)
    session.close()
    return [trie.session_bytes(tokens) for tokens in LENGTHS]


LENGTHS = (1, 100, 10_000)


def test_a_model_that_computes_no_numbers_is_told_from_others() -> None:
    kind = tiny("llama")
    plain = plain_forward(kind)
    assert not warm_up(kind.make_layers, lambda *each: plain(*each) * nan, VOCAB, CONTEXT).from_numbers


def failing(tokens: mx.array, layers: list[object]) -> mx.array:
    raise RuntimeError("no kernel for this")


@pytest.mark.parametrize("prove", [warm_up, sketch])
def test_a_model_that_cannot_compute_is_refused(prove: Callable[..., None]) -> None:
    with pytest.raises(ComputeError, match=r"^the model cannot compute: RuntimeError: no kernel for this$"):
        prove(tiny("llama").make_layers, failing, VOCAB, CONTEXT)


@pytest.mark.parametrize("name", KINDS)
def test_a_sketch_computes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large model the forwards would take seconds and memory for a token that is not needed."""
    kind = tiny(name)
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("evaluated"))
    monkeypatch.setattr(mx, "async_eval", lambda *_: pytest.fail("evaluated"))
    results: list[mx.array] = []

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        results.append(plain_forward(kind)(tokens, layers))
        return results[-1]

    before = mx.get_active_memory()
    facts, _ = sketch(kind.make_layers, forward, VOCAB, CONTEXT)
    assert [array.shape[:2] for array in results] == [(1, 16), (1, 1)]
    assert mx.get_active_memory() - before < results[0].nbytes, "not even the scores of the prompt"
    monkeypatch.undo()
    assert [facts.bytes_of(tokens) for tokens in LENGTHS] == taken(kind, 16, 1)
