"""The trial that finds out if a model can be batched: models that can, models that cannot, and faulty ones."""

from collections.abc import Callable
from math import nan

import mlx.core as mx
import pytest

from runner.commands.check.trial import batch_fault
from scripts.tools.models.tiny import VOCAB, tiny
from tests.lib.memory import held_bytes
from tests.lib.tiny_engine import BATCHABLE

Forward = Callable[[mx.array, list[object]], mx.array]


def fault(kind: str = "llama", forward: Forward | None = None) -> str:
    return batch_fault(tiny(kind).make_layers, forward or tiny(kind).logits, VOCAB)


def spoiled(spoil: Callable[[mx.array, mx.array], mx.array]) -> Forward:
    """A llama, of which `spoil(tokens, logits)` changes what it says to more than one row."""
    right = tiny("llama").logits

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        logits = right(tokens, layers)
        return spoil(tokens, logits) if tokens.shape[0] > 1 else logits

    return forward


@pytest.mark.parametrize("kind", BATCHABLE)
def test_models_that_can_be_batched(kind: str) -> None:
    assert fault(kind) == ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [("quantized", "HadamardKVCache"), ("llama4", "ChunkedKVCache"), ("deepseek_v41", "LayerCache")],
)
def test_layers_that_have_no_batch_are_named(kind: str, said: str) -> None:
    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        raise AssertionError("nothing is to be tried")

    assert fault(kind, forward) == f"mlx-lm has no batch of {said}"


@pytest.mark.parametrize("chosen", ["first", "longest", "one further"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek_v3"])
def test_one_position_for_all_rows_is_found(kind: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model has it that asks one row for it, or that counts the padding."""
    right = mx.fast.rope

    def rope(x: mx.array, dims: int, *, offset: int | mx.array, **rest: object) -> mx.array:
        if isinstance(offset, mx.array) and offset.size > 1:
            one = {"first": offset[0], "longest": mx.max(offset), "one further": offset + 1}[chosen]
            offset = mx.broadcast_to(one, offset.shape)
        return right(x, dims, offset=offset, **rest)  # type: ignore[arg-type]

    assert fault(kind) == ""
    monkeypatch.setattr(mx.fast, "rope", rope)
    assert "off by" in fault(kind)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_every_row_counts(row: int) -> None:
    """The long one of the first two is there for two steps, the one that joins later for three."""
    count = 0

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal count
        count += 1
        place = row if count <= 2 else {0: 0, 2: 1}.get(row)
        return mx.concatenate([-x if index == place else x for index, x in enumerate(mx.split(logits, len(logits)))])

    assert "off by" in fault(forward=spoiled(spoil))
    assert count == 4


@pytest.mark.parametrize("wrong", range(4))
def test_a_single_step_does_not_count(wrong: int) -> None:
    """An expert chosen by a hair takes one step of a row far away."""
    count = -1

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal count
        count += 1
        return -logits if count == wrong else logits

    assert fault(forward=spoiled(spoil)) == ""
    assert count == 3


@pytest.mark.parametrize(("dtype", "near", "far"), [(mx.float32, 0.01, 0.06), (mx.bfloat16, 0.05, 0.2)])
def test_rounding_is_no_fault_and_more_is_one(dtype: mx.Dtype, near: float, far: float) -> None:
    """In a part of the spread of the logits, which a model in 16 bits loses a few hundredths of."""
    right = tiny("llama").logits

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        logits = right(tokens, layers)
        for layer_cache in layers:
            keys, values = (vars(layer_cache)[name].astype(dtype) for name in ("keys", "values"))
            vars(layer_cache).update(keys=keys, values=values)
        noise = mx.random.normal(logits.shape, key=mx.random.key(3)) if tokens.shape[0] > 1 else mx.zeros(logits.shape)
        centred = logits - mx.mean(logits, -1, keepdims=True)
        spread = mx.linalg.norm(centred, axis=-1, keepdims=True)
        return logits + share * spread * noise / mx.linalg.norm(noise + 1e-9, axis=-1, keepdims=True)

    share = near
    assert fault(forward=forward) == ""
    share = far
    assert "off by" in fault(forward=forward)


def test_what_is_no_number_is_a_fault() -> None:
    """NaN beside NaN is no agreement."""
    everywhere: Forward = lambda *each: tiny("llama").logits(*each) * nan  # noqa: E731
    for forward in (everywhere, spoiled(lambda _, logits: logits * nan)):
        assert fault(forward=forward) == "the logits of a trial are off by inf"


def test_tokens_that_a_model_closes_are_none() -> None:
    right = tiny("llama").logits
    closed = mx.where(mx.arange(VOCAB) < 4, -mx.inf, 0)
    assert fault(forward=lambda tokens, layers: right(tokens, layers) + closed) == ""


@pytest.mark.parametrize("when", ["prompt", "step", "batch"])
def test_what_a_model_raises_is_a_fault(when: str) -> None:
    """Its first line, whether a prompt makes it raise, a step alone, or several rows."""
    right = tiny("llama").logits

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        rows, count = tokens.shape
        if {"prompt": count > 1, "step": rows == count == 1, "batch": rows > 1}[when]:
            raise IndexError("not like this\nbut otherwise")
        return right(tokens, layers)

    assert fault(forward=forward) == "IndexError: not like this"


def test_a_trial_is_cheap() -> None:
    counts: list[tuple[int, ...]] = []
    right = tiny("llama").logits

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        counts.append(tokens.shape)
        return right(tokens, layers)

    assert fault(forward=forward) == ""
    assert sorted(counts) == [(1, 1)] * 9 + [(1, 3), (1, 8), *[(1, 16)] * 4, *[(2, 1)] * 3, (3, 1)]


@pytest.mark.parametrize("broken", [False, True])
def test_a_trial_leaves_nothing_behind(broken: bool) -> None:
    fault()
    before = held_bytes()
    fault(forward=spoiled(lambda tokens, logits: logits[:, :, 1:]) if broken else None)
    assert held_bytes() == before
    assert mx.get_cache_memory() == 0
