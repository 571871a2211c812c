"""Keys and values per token: KVCache, HadamardKVCache and ConcatenateKVCache, which share an adapter.

Scenarios: docs/internals/cache.md, 8.
"""

import mlx.core as mx
import pytest

from runner.cache.layers.adapter import LayerState
from runner.cache.layers.kv import KVState
from tests.lib.layer_caches import (
    SLICEABLE,
    allocated,
    held,
    kept,
    layer,
    ledger,
    paged_out,
    taken,
    write,
    write_unseen,
)
from tests.lib.memory import held_bytes

ROOM = [kind for kind in SLICEABLE if kind != "exact"]  # kinds with room behind their offset
SLACK = 16384


@pytest.fixture(params=SLICEABLE)
def state(request: pytest.FixtureRequest) -> LayerState:
    """A fresh layer of each kind."""
    found = layer(request.param)
    assert isinstance(found, KVState)
    return found


@pytest.mark.parametrize("count", [10, 256])  # 256 fill the buffer, which could be kept as it is
def test_a_rewind_and_a_write_leave_every_snapshot_intact(state: LayerState, count: int) -> None:  # scenario 29
    write(state, count)
    whole, snapshot = taken(state), taken(state, 5)
    state.rewind(5)
    write(state, 3, first=500)
    assert held(state) == [0, 1, 2, 3, 4, 500, 501, 502]
    assert (kept(whole), kept(snapshot)) == (list(range(count)), list(range(5, count)))
    assert ledger(state) == (2, whole.nbytes + snapshot.nbytes)
    state.rewind(5)
    state.restore([snapshot])
    assert held(state) == list(range(count))


def test_every_write_after_a_rewind_copies_out(state: LayerState) -> None:
    """Scenario 30: live before one write and the next, which is after another rewind (Ollama commit 144893850)."""
    write(state, 30)
    snapshots = [taken(state, start, start + 10) for start in (0, 10, 20)]
    for to in (20, 10):
        state.rewind(to)
        write(state, 2, at_once=False, first=500 + to)
    assert [snapshot.live for snapshot in snapshots] == [True, False, False]
    assert [kept(snapshot) for snapshot in snapshots[1:]] == [list(range(10, 20)), list(range(20, 30))]
    state.rewind(5)
    write(state, 2, first=700)
    assert kept(snapshots[0]) == list(range(10))


def test_slices_need_what_comes_before_them(state: LayerState) -> None:  # scenario 26
    write(state, 10)
    snapshot = taken(state, 5)
    state.rewind(0)
    write(state, 1)
    state.reset()
    for there in (0, 4, 6):
        state.reset()
        if there:
            write(state, there, first=100)
        with pytest.raises(ValueError, match=f"at {there} tokens cannot go on with 5..10"):
            state.restore([snapshot])
        assert (state.offset, state.empty) == (there, not there)
    assert kept(snapshot) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("count", [1, 5, 255, 256, 257, 300, 512])
def test_slices_come_back_bit_by_bit(state: LayerState, count: int) -> None:  # scenarios 27 and 45
    write(state, count)
    before = _bits(state)
    snapshot = paged_out(state)
    assert state.empty
    write(state, 7, first=900)
    state.reset()
    state.restore([snapshot])
    assert (state.offset, held(state)) == (count, list(range(count)))
    assert _bits(state) == before
    assert write(state, 1) == list(range(count + 1))
    assert snapshot.live
    assert write(state, 300) == list(range(count + 301))


def test_a_part_comes_back_by_a_cut(state: LayerState) -> None:  # scenarios 27, 28 and 19: a clamp is a cut here
    write(state, 300)
    whole = paged_out(state)
    for to in (299, 256, 1):
        first, second = whole.split(to)
        assert first is not None
        state.restore([first])
        assert held(state) == list(range(to))
        assert write(state, 1, first=700)[-1] == 700
        state.rewind(0)
        write(state, 1)
        state.reset()
        with pytest.raises(ValueError, match="do not meet"):
            first.after(second)
        joined = second.after(first)
        assert joined is not None
        assert (joined.start, joined.stop, joined.live) == (0, 300, False)
        whole = joined
    assert kept(whole) == list(range(300))
    assert ledger(state) == (1, whole.nbytes)


@pytest.mark.parametrize("live", [True, False])
def test_a_hole_leaves_nothing(state: LayerState, live: bool) -> None:  # scenario 25
    write(state, 30)
    alone = taken(state, 20)
    if not live:
        paged_out(state).close()
    assert alone.after(None) is None
    with pytest.raises(RuntimeError, match="closed before"):
        alone.close()
    assert ledger(state) == (0, 0)


def test_a_rewind_stays_within(state: LayerState) -> None:
    write(state, 10)
    for to in (-1, 11):
        assert not state.can_rewind(to)
        with pytest.raises(ValueError, match=f"at 10 tokens cannot go back to {to}"):
            state.rewind(to)
    state.rewind(10)
    assert held(state) == list(range(10))
    state.rewind(0)
    assert (state.offset, write(state, 2)) == (0, [0, 1])


@pytest.mark.parametrize("kind", ROOM)
def test_the_first_write_after_a_restore_moves_nothing(kind: str) -> None:  # scenario 74
    state = layer(kind)
    write(state, 4000)
    snapshot = paged_out(state)
    state.restore([snapshot])
    mx.eval(state.arrays())
    buffers = state.nbytes
    assert state.arrays()[0].shape[-2] == 4032
    after, peak = allocated(lambda: write_unseen(state, 4000))
    assert peak <= buffers // 10
    assert after <= SLACK


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("kind", ROOM)
def test_room_is_given_back(kind: str) -> None:
    state = layer(kind)
    write(state, 4000)
    parts = [taken(state, 0, 1000), taken(state, 1000)]
    state.rewind(1000)
    write(state, 1, first=500)
    parts.pop().close()
    buffers = state.nbytes
    state.trim(3095)
    assert state.nbytes == buffers
    before = held_bytes()
    state.trim(3094)
    mx.eval(state.arrays())
    assert before - held_bytes() >= buffers * 3 // 4 - SLACK
    assert parts[0].live
    assert held(state) == [*range(1000), 500]
    assert write(state, 2, first=501) == [*range(1000), 500, 501, 502]
    layer(kind).trim(0)  # nothing there


def _bits(state: LayerState) -> list[object]:
    """Everything it holds up to its offset."""
    return [x[..., : state.offset, :].tolist() for x in state.arrays()]
