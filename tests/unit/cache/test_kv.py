"""Keys and values per token: KVCache, QuantizedKVCache and ConcatenateKVCache, which share an adapter.

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

from typing import cast

import mlx.core as mx
import pytest

from runner.cache.layer_interface import LayerState, Snapshot
from runner.cache.layers import flatten
from runner.cache.layers.kv import KVState
from runner.cache.sequence import SequenceLayers
from tests.lib.layer_caches import (
    SLICEABLE,
    Appending,
    allocated,
    held,
    kept,
    layer,
    ledger,
    paged_out,
    positions,
    taken,
    write,
)
from tests.lib.memory import held_bytes

ROOM = [kind for kind in SLICEABLE if kind != "exact"]  # kinds with room behind their offset
SLACK = 16384


def close(*snapshots: Snapshot | None) -> None:
    for snapshot in snapshots:
        assert snapshot is not None
        snapshot.close()


@pytest.fixture(params=SLICEABLE)
def state(request: pytest.FixtureRequest) -> LayerState:
    """A fresh layer of each kind."""
    found = layer(request.param)
    assert isinstance(found, KVState)
    return found


# --- rewound and written over


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


def test_a_write_across_two_snapshots_leaves_both_intact(state: LayerState) -> None:
    """Scenario 30: the first write after the rewind ends in the middle of one; the next one goes beyond both."""
    write(state, 30)
    first, second = taken(state, 10, 20), taken(state, 20)
    state.rewind(5)
    write(state, 7, first=500)
    write(state, 13, first=600)
    assert (kept(first), kept(second)) == (list(range(10, 20)), list(range(20, 30)))
    assert held(state) == [*range(5), *range(500, 507), *range(600, 613)]


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


def test_what_lies_before_a_write_stays_live(state: LayerState) -> None:
    write(state, 30)
    snapshot = taken(state, 10, 20)
    write(state, 300)
    state.rewind(20)
    write(state, 5, first=500)
    assert snapshot.live
    assert ledger(state) == (1, 0)
    state.rewind(19)
    write(state, 1, first=600)
    assert kept(snapshot) == list(range(10, 20))


def test_a_reset_copies_out_what_is_live() -> None:  # scenario 31
    for kind in SLICEABLE:
        sequence, (state,) = _sequence(kind, 30)
        snapshots = [taken(state, 0, 10), taken(state, 10)]
        sequence.reset()
        assert (sequence.offset, sequence.nbytes, state.empty) == (0, 0, True)
        assert [kept(snapshot) for snapshot in snapshots] == [list(range(10)), list(range(10, 30))]
        assert sequence.ledger.nbytes == sum(snapshot.nbytes for snapshot in snapshots) > 0
        assert write(state, 2) == [0, 1]


def test_a_reset_copies_out_what_lies_behind_the_offset() -> None:  # scenario 31
    for kind in ROOM:
        sequence, (state,) = _sequence(kind, 30)
        snapshot = taken(state, 10)
        assert not sequence.rewind(10)
        assert snapshot.live
        sequence.reset()
        assert kept(snapshot) == list(range(10, 30))


# --- restored


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


def test_slices_follow_each_other(state: LayerState) -> None:
    write(state, 30)
    parts = [taken(state, 0, 10), taken(state, 10, 20), taken(state, 20)]
    paged_out(state).close()
    for wrong in ([parts[0], parts[2]], [parts[1], parts[0]], [parts[0], parts[1], parts[1]]):
        with pytest.raises(ValueError, match="cannot go on with"):
            state.restore(wrong)
        assert state.offset == 0
    state.restore([])
    assert state.offset == 0
    state.restore(parts)
    assert held(state) == list(range(30))


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


def test_a_part_comes_back_by_a_cut(state: LayerState) -> None:  # scenario 27: what was a clamp is a cut here
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
        joined = second.after(first)
        assert joined is not None
        whole = joined
    assert kept(whole) == list(range(300))
    assert ledger(state) == (1, whole.nbytes)


def test_both_halves_come_back_one_after_the_other(state: LayerState) -> None:  # scenario 28
    write(state, 300)
    whole = paged_out(state)
    size = whole.nbytes
    first, second = whole.split(120)
    assert first is not None
    assert (first.start, first.stop, second.start, second.stop) == (0, 120, 120, 300)
    assert first.nbytes + second.nbytes == size
    assert ledger(state) == (2, size)
    with pytest.raises(RuntimeError, match="closed before"):
        whole.close()
    state.restore([first])
    assert held(state) == list(range(120))
    state.restore([second])
    assert held(state) == list(range(300))
    assert ledger(state) == (2, 0)


def test_halves_join_into_the_whole(state: LayerState) -> None:  # scenarios 28 and 19
    write(state, 30)
    first, second = taken(state, 0, 20), taken(state, 20)
    with pytest.raises(ValueError, match="do not meet"):
        first.after(second)
    assert ledger(state)[0] == 2
    paged_out(state).close()
    joined = second.after(first)
    assert joined is not None
    assert (joined.start, joined.stop, joined.live) == (0, 30, False)
    assert kept(joined) == list(range(30))
    assert ledger(state) == (1, joined.nbytes)
    for part in (first, second):
        with pytest.raises(RuntimeError, match="closed before"):
            part.close()


@pytest.mark.parametrize("live", [0, 1])
def test_a_live_half_and_an_owned_one_join(state: LayerState, live: int) -> None:
    write(state, 30)
    halves = taken(state, 0, 20), taken(state, 20)
    if live == 0:
        state.rewind(20)
        write(state, 1, first=500)
    else:
        paged_out(state).close()
        write(state, 20, first=0)
        state.restore([halves[1]])
    assert [half.live for half in halves] == [live == 0, live == 1]
    joined = halves[1].after(halves[0])
    assert kept(joined) == list(range(30))
    assert joined is not None
    assert ledger(state) == (1, joined.nbytes)


def test_a_live_whole_is_cut_and_joined_in_place(state: LayerState) -> None:  # scenario 32
    write(state, 30)
    first, second = taken(state).split(20)
    assert first is not None
    assert (first.live, second.live, ledger(state)) == (True, True, (2, 0))
    state.rewind(20)
    write(state, 1, first=500)
    assert first.live
    assert kept(second) == list(range(20, 30))
    state.rewind(0)
    write(state, 1, first=600)
    assert kept(first) == list(range(20))


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


@pytest.mark.parametrize("kind", ROOM)
def test_what_is_still_there_is_not_written_again(kind: str) -> None:  # scenario 32
    state = layer(kind)
    write(state, 3000)
    parts = [taken(state, 0, 1000), taken(state, 1000, 2000), taken(state, 2000)]
    state.rewind(0)
    after, peak = allocated(lambda: state.restore(parts[:2]))
    assert (after, peak) == (0, 0)
    assert (state.offset, [part.live for part in parts]) == (2000, [True] * 3)
    state.restore(parts[2:])
    assert held(state) == list(range(3000))


@pytest.mark.parametrize("order", ["owned live", "live owned live", "live live owned", "live owned owned"])
@pytest.mark.parametrize("kind", ROOM)
def test_live_and_owned_slices_come_back_together(kind: str, order: str) -> None:
    """Slices ahead of the offset that are still there, some that are not, and some that are again."""
    state = layer(kind)
    words = order.split()
    write(state, 10 * len(words))
    parts: list[Snapshot] = []
    for place, word in enumerate(words):
        part = taken(state, 10 * place, 10 * place + 10)
        if word == "owned":
            # One that lies elsewhere: of a conversation with these tokens that another layer wrote.
            other = layer(kind)
            write(other, 10 * place + 10)
            part.close()
            part = paged_out(other, 10 * place)
        parts.append(part)
    state.rewind(0)
    state.restore(parts)
    assert all(part.live for part in parts)
    assert held(state) == list(range(10 * len(words)))
    state.rewind(0)
    write(state, 1, first=900)
    assert [kept(part) for part in parts] == [list(range(10 * n, 10 * n + 10)) for n in range(len(words))]


def test_out_in_and_out_again(state: LayerState) -> None:
    """Two conversations that take turns, each going on where it was."""
    lengths = {0: 0, 1000: 0}
    parts: dict[int, list[Snapshot]] = {0: [], 1000: []}
    for turn in range(6):
        name = 1000 * (turn % 2)
        state.rewind(0)
        state.restore(parts[name])
        count = 5 + 40 * turn
        write(state, count, first=name + lengths[name])
        assert held(state) == list(range(name, name + lengths[name] + count))
        parts[name].append(taken(state, lengths[name]))
        lengths[name] += count
        mine, others = parts[name], parts[1000 - name]
        assert all(part.live for part in mine)
        assert not any(part.live for part in others)
        assert ledger(state) == (len(mine) + len(others), sum(part.nbytes for part in others))
    for name, some in parts.items():
        state.rewind(0)
        state.restore(some)
        assert held(state) == list(range(name, name + lengths[name]))
    close(*parts[0], *parts[1000])
    assert ledger(state) == (0, 0)


# --- rewound


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


@pytest.mark.parametrize("at_once", [True, False])
def test_a_rewind_drops_the_tail(state: LayerState, at_once: bool) -> None:
    """mlx-lm's ConcatenateKVCache would bring it back with the next write."""
    write(state, 8)
    state.rewind(2)
    assert write(state, 3, at_once, first=9) == [0, 1, 9, 10, 11]
    assert (state.offset, held(state)) == (5, [0, 1, 9, 10, 11])


def test_a_rewound_layer_goes_on_with_what_it_stored(state: LayerState) -> None:
    write(state, 20)
    snapshot = taken(state, 10)
    state.rewind(10)
    write(state, 50, first=500)
    state.rewind(10)
    state.restore([snapshot])
    assert held(state) == list(range(20))


# --- buffers


@pytest.mark.parametrize("kind", ROOM)
def test_the_first_write_after_a_restore_moves_nothing(kind: str) -> None:  # scenario 74
    state = layer(kind)
    write(state, 4000)
    snapshot = paged_out(state)
    state.restore([snapshot])
    buffers = state.nbytes
    assert _capacity(state) == 4096
    after, peak = allocated(lambda: _forward(state))
    assert peak <= buffers // 10
    assert after <= SLACK


@pytest.mark.parametrize("kind", ROOM)
def test_a_restore_into_a_fitting_buffer_allocates_nothing_that_stays(kind: str) -> None:
    state = layer(kind)
    write(state, 2000)
    snapshot = taken(state, 1900)
    state.rewind(1900)
    write(state, 60, first=500)
    buffers, size = state.nbytes, snapshot.nbytes
    state.rewind(1900)
    after, peak = allocated(lambda: state.restore([snapshot]))
    assert state.nbytes == buffers
    assert -size - SLACK <= after <= -size + SLACK
    assert peak <= buffers // 10
    assert held(state) == list(range(2000))


@pytest.mark.parametrize("kind", ROOM)
def test_a_buffer_of_a_much_longer_conversation_is_left(kind: str) -> None:
    state = layer(kind)
    write(state, 100)
    snapshot = paged_out(state)
    write(state, 3000, first=500)
    state.rewind(0)
    state.restore([snapshot])
    assert _capacity(state) == 256
    assert held(state) == list(range(100))


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("kind", ROOM)
def test_room_is_given_back(kind: str) -> None:
    state = layer(kind)
    write(state, 4000)
    parts = [taken(state, 0, 1000), taken(state, 1000)]
    state.rewind(1000)
    write(state, 1, first=500)
    close(parts.pop())
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


def _sequence(kind: str, count: int) -> tuple[SequenceLayers, list[LayerState]]:
    """Returns a sequence over one layer that has seen so many tokens."""
    sequence = SequenceLayers(list(flatten([SLICEABLE[kind]()])))
    sequence.page_out()
    _update(sequence.states[0], count)
    sequence.advance(count)
    sequence.evaluate()
    return sequence, sequence.states


def _forward(state: LayerState) -> None:
    _update(state, 1)
    mx.eval(state.arrays())


def _update(state: LayerState, count: int) -> None:
    """A write without a look at what is there."""
    entries = positions(state.offset, count)
    cast("Appending", cast("KVState", state).layer).update_and_fetch(entries, -entries)


def _capacity(state: LayerState) -> int:
    """Tokens that fit into the buffers."""
    return state.arrays()[0].shape[-2]


def _bits(state: LayerState) -> list[object]:
    """Everything it holds up to its offset."""
    return [x[..., : state.offset, :].tolist() for x in state.arrays()]
