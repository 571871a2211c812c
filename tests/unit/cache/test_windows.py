"""Sliding windows and chunks: RotatingKVCache and ChunkedKVCache, which drop what is too far back.

Scenarios: docs/internals/cache.md, 8.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

from runner.cache.layer_interface import Miss, Snapshot
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.snapshot import complete
from runner.cache.layers.window import ChunkState, WindowState
from runner.cache.sketch import LayerFacts

from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache  # isort: skip

from tests.lib.layer_caches import (
    ENTRY,
    adapted,
    allocated,
    entries,
    held,
    kept,
    layer,
    ledger,
    paged_out,
    taken,
    write,
)

SLACK = 16384  # what an array may be larger than its bytes


def window(size: int) -> WindowState:
    state = adapted(RotatingKVCache(size))
    assert isinstance(state, WindowState)
    return state


def chunk(size: int) -> ChunkState:
    state = adapted(ChunkedKVCache(size))
    assert isinstance(state, ChunkState)
    return state


def bring_back(state: LayerState, *snapshots: Snapshot) -> None:
    """The layer stands at the last of the snapshots again, whatever it did meanwhile; they stay as they are."""
    complete(state.page_out())
    before = ledger(state)
    state.restore(snapshots)
    assert state.offset == snapshots[-1].stop
    assert not any(snapshot.live for snapshot in snapshots)
    assert ledger(state) == before


def pieces(state: LayerState, *stops: int, whole: bool = False) -> list[Snapshot]:
    """Returns the snapshots of several forwards, up to these offsets: each of its own edge, or `whole`: of all that is
    needed there. The layer is fresh afterwards."""
    found: list[Snapshot] = []
    for stop in stops:
        start = state.offset
        write(state, stop - start)
        found.append(taken(state, 0 if whole else start))
    complete(state.page_out())
    state.reset()
    return found


def edges(snapshots: Sequence[Snapshot]) -> list[list[int]]:
    """The first and the last offset of each, which has these tokens and no others."""
    assert [kept(each) for each in snapshots] == [list(range(each.start, each.stop)) for each in snapshots]
    assert [each.nbytes for each in snapshots] == [(each.stop - each.start) * ENTRY for each in snapshots]
    return [[each.start, each.stop] for each in snapshots]


@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("count", [3, 8, 13])
def test_a_checkpoint_counts_with_what_a_snapshot_takes(kind: str, count: int) -> None:
    """After a forward over many tokens the buffers hold more."""
    state, facts = layer(kind), LayerFacts(list)
    write(state, count)
    facts.measure([state])
    assert facts.point_bytes == paged_out(state).nbytes


def test_a_full_ring_does_not_go_back() -> None:  # scenario 33
    state = window(4)
    write(state, 10, at_once=False)
    for to in (3, 6, 9, 11, -1):
        assert not state.can_rewind(to)
        with pytest.raises(ValueError, match="cannot go back"):
            state.rewind(to)
    state.rewind(10)
    assert state.refusal == Miss.WINDOW_PASSED
    snapshot = taken(state)
    write(state, 5, at_once=False)
    assert kept(snapshot) == [6, 7, 8, 9]
    state.restore([snapshot])
    assert held(state) == [6, 7, 8, 9]
    write(state, 1)
    assert held(state) == [7, 8, 9, 10]
    assert kept(snapshot) == [6, 7, 8, 9]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 65])
def test_a_window_comes_back_as_it_was(count: int, at_once: bool) -> None:  # scenarios 34 and 35
    """After a long prefill mlx-lm's buffer holds all of it; after decode the oldest token is anywhere in it."""
    state = window(32)
    write(state, count, at_once)
    expected = list(range(max(0, count - 32), count))
    snapshot = paged_out(state)
    assert kept(snapshot) == expected
    assert snapshot.nbytes == len(expected) * ENTRY
    for at_once_again in (True, False):
        bring_back(state, snapshot)
        assert held(state) == expected
        write(state, 5, at_once_again)
        assert held(state) == list(range(max(0, count - 27), count + 5))
        assert kept(snapshot) == expected


@pytest.mark.parametrize("at_once", [True, False])
def test_a_chunk_after_growth_in_decode_finds_no_padding(at_once: bool) -> None:  # scenario 38
    """A window of 512 grows by 256 entries at a time: the rest of them is unused."""
    state = window(512)
    write(state, 5, at_once)
    write(state, 2, at_once=False)
    snapshot = taken(state)
    assert write(state, 3) == list(range(10))
    assert kept(snapshot) == list(range(7))
    bring_back(state, snapshot)
    assert write(state, 1, at_once=False) == list(range(8))
    bring_back(state, snapshot)
    assert write(state, 3) == list(range(10))


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("size", [16, 512])
def test_a_rewound_window_finds_no_stale_tail(size: int, at_once: bool) -> None:  # scenario 39
    state = window(size)
    write(state, 8, at_once)
    state.rewind(2)
    assert held(state) == [0, 1]
    write(state, 3, at_once, first=9)
    assert held(state) == [0, 1, 9, 10, 11]
    state.rewind(0)
    assert state.empty
    assert write(state, 2) == [0, 1]


@pytest.mark.parametrize(("before", "at_once"), [(0, False), (3, True), (5, False), (8, True)])
def test_any_tokens_of_a_window_are_read_in_the_order_of_time(before: int, at_once: bool) -> None:
    """Unfilled with and without room behind, exactly full, longer than the window after a forward over many tokens, and
    wrapped at every turn; before the turn, across it and behind it."""
    turns = set()
    for count in range(1, 12):
        state = window(5)
        write(state, before)
        write(state, count, at_once)
        offset, buffer = state.offset, state.arrays()[0].shape[-2]
        turns.add((buffer, state.layer._idx))
        oldest = state.needs(offset)
        for start in range(oldest, offset):
            for stop in range(start + 1, offset + 1):
                assert entries(state, start, stop) == list(range(start, stop)), (count, start, stop)
    if at_once:
        assert max(buffer for buffer, _ in turns) == (4 if before > 4 else max(before, 0)) + 11
    elif before != 8:
        assert {(5, idx) for idx in range(1, 6)} <= turns


def test_a_ring_is_cut_before_it_is_joined() -> None:
    """A token of it costs a token, not another ring."""
    state = window(4096)
    write(state, 5000, at_once=True)
    write(state, 3, at_once=False)
    for start, stop in ((5001, 5003), (910, 912), (4998, 5002)):
        _, peak = allocated(lambda start=start, stop=stop: mx.eval(state.copy_tokens(start, stop).arrays))  # type: ignore[misc]
        assert peak <= 16 * ENTRY + SLACK


@pytest.mark.parametrize("make", [window, chunk])
def test_a_gap_is_refused(make: Callable[[int], LayerState]) -> None:
    """And the layer stays as it was."""
    state = make(32)
    first, second, third = pieces(state, 5, 15, 30)
    write(state, 3, first=500)
    for some, missing in (([first, third], "0..15"), ([second, third], "0..5"), ([third], "0..15"), ([second], "0..5")):
        with pytest.raises(ValueError, match=f"tokens {missing} are missing to stand at {some[-1].stop}"):
            state.restore(some)
        assert (state.offset, held(state)) == (3, [500, 501, 502])
    assert not any(each.live for each in (first, second, third))
    bring_back(state, first, second, third)
    assert held(state) == list(range(30))


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("at", [1, 7, 15])
@pytest.mark.parametrize("count", [16, 17, 40])
def test_a_tail_is_cut_into_what_lies_on_either_side(count: int, at: int, live: bool) -> None:
    state = window(16)
    write(state, count)
    oldest = count - 16
    whole = taken(state) if live else paged_out(state)
    first, second = whole.split(oldest + at)
    assert first is not None
    with pytest.raises(RuntimeError, match="closed before"):
        whole.close()
    assert (first.live, second.live) == (live, live)
    assert ledger(state) == (2, 0 if live else 16 * ENTRY)
    if live:
        write(state, 3, at_once=False, first=900)
    assert edges([first, second]) == [[oldest, oldest + at], [oldest + at, count]]
    bring_back(state, first, second)
    assert held(state) == list(range(oldest, count))
    with pytest.raises(ValueError, match=f"tokens {oldest}..{oldest + at} are missing"):
        state.restore([second])
    complete(state.page_out())
    if oldest == 0:
        bring_back(state, first)
        assert held(state) == list(range(at))
        assert write(state, 2) == list(range(at + 2))
    else:  # what it held before that was of no use to the whole
        with pytest.raises(ValueError, match=f"tokens {max(0, oldest + at - 16)}..{oldest} are missing"):
            state.restore([first])


@pytest.mark.parametrize("where", ["live", "owned", "owned, then live"])
def test_two_tails_join_into_what_the_later_end_needs(where: str) -> None:  # scenarios 19 and 21
    state = window(8)
    write(state, 6)
    first = taken(state)
    write(state, 5)
    second = taken(state, 6)
    if where == "owned":
        complete(state.page_out())
    elif where == "live":
        first.close()
        second.close()
        first, second = (part for part in taken(state).split(6) if part is not None)
    joined = second.after(first)
    assert joined is not None
    live = where != "owned"  # the layer stands at the end of both, and holds all that is needed there
    assert (joined.start, joined.stop, joined.live) == (3, 11, live)
    assert ledger(state) == (1, 0 if live else 8 * ENTRY)
    for part in (first, second):
        with pytest.raises(RuntimeError, match="closed before"):
            part.close()
    complete(state.page_out())
    assert edges([joined]) == [[3, 11]]
    bring_back(state, joined)
    assert held(state) == list(range(3, 11))
    # It can still be cut, and joined again.
    upper, lower = joined.split(9)
    assert upper is not None
    again = lower.after(upper)
    assert edges([again] if again else []) == [[3, 11]]


def test_across_a_gap_the_later_tail_stays() -> None:  # scenario 25
    """It may still be good for something: from there on."""
    state = window(16)
    first, second, third = pieces(state, 5, 10, 14)
    assert third.after(first) is third
    assert third.after(None) is third
    with pytest.raises(RuntimeError, match="closed before"):
        first.close()
    assert ledger(state)[0] == 2
    assert edges([second, third]) == [[5, 10], [10, 14]]


def test_a_chunk_needs_the_tokens_from_its_start_on() -> None:
    """At the start of one nothing is: a single token keeps the buffers at their place."""
    state = chunk(16)
    assert [state.needs(at) for at in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48)] == [0, 0, 0, 15, 16, 16, 31, 32, 32, 47]
    needed = [state.needs(at) for at in range(1, 100)]
    assert needed == sorted(needed)
    assert all(begin < at for at, begin in enumerate(needed, 1))


@pytest.mark.parametrize("count", [5, 15, 16, 17, 31, 32, 33, 40])
def test_a_chunk_comes_back_as_it_was(count: int) -> None:
    state = chunk(16)
    write(state, count // 2)
    write(state, count - count // 2)
    expected = list(range(min(count // 16 * 16, count - 1), count))
    snapshot = paged_out(state)
    assert kept(snapshot) == expected
    assert snapshot.nbytes == len(expected) * ENTRY
    for _ in range(2):
        bring_back(state, snapshot)
        assert held(state) == expected
        assert state.layer.start_position == expected[0]
        assert write(state, 1)[-1] == count
        assert write(state, 20)[-21:] == list(range(count, count + 21))
    assert kept(snapshot) == expected


def test_a_chunk_goes_back_while_its_start_is_there() -> None:  # scenario 14
    state = chunk(16)
    write(state, 40)
    write(state, 4)
    assert state.layer.start_position == 24
    for to in (31, 24, 16, 0, -1, 45):
        assert not state.can_rewind(to)
        with pytest.raises(ValueError, match="cannot go back"):
            state.rewind(to)
        assert state.offset == 44
    snapshot = taken(state)
    complete(state.page_out())
    state.rewind(33)
    assert write(state, 2, first=500)[-10:] == [*range(25, 33), 500, 501]
    assert state.can_rewind(32)
    state.rewind(32)
    assert held(state)[-7:] == list(range(25, 32))
    assert kept(snapshot) == list(range(32, 44))
