"""States of which nothing can be taken back: ArraysCache, and every class that only the generic adapter serves.

Scenarios: docs/internals/cache.md, 8.
"""

from collections.abc import Callable

import mlx.core as mx
import pytest

from runner.cache.layer_interface import Miss
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.snapshot import Ledger, complete
from runner.cache.layers.states import GenericState, RecurrentState

from mlx_lm.models.cache import ArraysCache, KVCache  # isort: skip

from tests.lib.layer_caches import adapted, held, layer, paged_out, taken, write
from tests.lib.memory import held_bytes


@pytest.fixture(params=["arrays", "generic"])
def state(request: pytest.FixtureRequest) -> LayerState:
    """A fresh layer of each kind that counts its tokens here."""
    return layer(request.param)


def test_a_state_stands_for_its_offset_only(state: LayerState) -> None:  # scenario 41
    write(state, 7)
    snapshot = taken(state, 3)
    assert (snapshot.start, snapshot.stop, state.needs(7)) == (6, 7, 6)
    assert state.snapshot(7, 7) is None
    assert state.snapshot(3, 6) is None
    assert state.snapshot(3, 8) is None
    write(state, 5)
    assert state.offset == 12
    for to in (0, 7, 11, 13, -1):
        assert not state.can_rewind(to)
        with pytest.raises(ValueError, match=f"at 12 tokens cannot go back to {to}"):
            state.rewind(to)
    state.rewind(12)
    assert state.refusal == Miss.NON_TRIMMABLE
    assert (state.offset, held(state)) == (12, list(range(12)))
    state.restore([snapshot])
    assert (state.offset, held(state)) == (7, list(range(7)))


def test_a_state_takes_its_own_kind_only(state: LayerState) -> None:
    write(state, 3)
    for kind in ("plain", "window"):
        other = layer(kind)
        write(other, 5)
        with pytest.raises(TypeError, match="made no"):
            state.restore([paged_out(other)])
    assert (state.offset, held(state)) == (3, [0, 1, 2])


def test_in_place_writes_do_not_reach_what_was_copied_out() -> None:
    """An in-place write changes the array *object*."""
    layer_cache = ArraysCache(1)
    layer_cache[0] = mx.zeros((1, 8))
    state = adapted(layer_cache)
    state.count_tokens(8)
    snapshot = taken(state)
    for _ in range(2):
        complete(state.page_out())
        layer_cache[0][:, 2:5] = 99
        state.restore([snapshot])
        assert mx.array_equal(layer_cache[0], mx.zeros((1, 8)))


def test_a_restored_state_belongs_to_no_batch() -> None:
    layer_cache = ArraysCache(2)
    state = adapted(layer_cache)
    assert isinstance(state, RecurrentState)
    layer_cache[0] = mx.full((1, 3, 4), 7.0)
    state.count_tokens(7)
    snapshot = taken(state)
    assert len(state.arrays()) == 1
    complete(state.page_out())
    layer_cache[0], layer_cache[1] = mx.zeros((1, 3, 4)), mx.zeros((1,))
    vars(layer_cache).update(left_padding=mx.array([1]), lengths=mx.array([2]))
    assert len(state.arrays()) == 4
    state.restore([snapshot])
    assert all(x is None for x in (layer_cache[1], layer_cache.left_padding, layer_cache.lengths))
    assert layer_cache[0] is not None
    assert mx.array_equal(layer_cache[0], mx.full((1, 3, 4), 7.0))


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("adapter", [adapted, lambda layer_cache: GenericState(layer_cache, Ledger())])
def test_a_convolution_state_keeps_no_forward_alive(adapter: Callable[[object], LayerState]) -> None:
    """mamba2's is a slice of what the forward made."""  # scenario 72
    layer_cache = ArraysCache(1)
    state = adapter(layer_cache)
    forward = mx.zeros((1, 4000, 64)) + 1
    layer_cache[0] = forward[:, -3:]
    mx.eval(layer_cache[0])
    del forward
    before = held_bytes()
    state.count_tokens(4000)
    snapshot = taken(state)
    complete(state.page_out())
    assert snapshot.nbytes == 3 * 64 * 4
    state.restore([snapshot])
    mx.eval(state.arrays())
    assert held_bytes() < before - 900_000


class Strange(KVCache):
    """A subclass that may do as it likes; its own word is not to be trusted."""

    def __init__(self, extra: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.listed: list[mx.array | None] = [mx.zeros((extra,)), None]
        self.nested: dict[str, tuple[object, ...]] = {"tuple": (1, mx.ones((2,)))}

    def trim(self, n: int) -> int:
        raise AssertionError(f"asked to trim {n}")

    def is_trimmable(self) -> bool:
        raise AssertionError("asked whether it is trimmable")


def test_a_subclass_gets_the_generic_adapter() -> None:  # scenario 46
    layer_cache = Strange(8)
    state = adapted(layer_cache)
    assert isinstance(state, GenericState)
    write(state, 10)
    listed = layer_cache.listed
    snapshot = taken(state)
    assert len(state.arrays()) == 4
    complete(state.page_out())
    assert snapshot.nbytes == sum(x.nbytes for x in state.arrays())
    write(state, 3)
    listed[0] = mx.full((8,), 5.0)
    layer_cache.nested["tuple"] = ()
    state.restore([snapshot])
    assert (state.offset, held(state)) == (10, list(range(10)))
    assert layer_cache.listed[0] is not None
    assert mx.array_equal(layer_cache.listed[0], mx.zeros((8,)))
    assert len(layer_cache.nested["tuple"]) == 2
    complete(state.page_out())
    state.reset()
    assert (state.offset, layer_cache.offset, layer_cache.keys) == (0, 0, None)
    assert len(state.arrays()) == 2
    layer_cache.listed.append(mx.ones((3,)))  # what it does with its own things does not reach the first day
    state.reset()
    assert len(state.arrays()) == 2
