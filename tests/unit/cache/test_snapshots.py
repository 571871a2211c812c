"""Snapshots of any layer: free while they are live, their own bytes once copied out. Slices and states move when they
come back; a tail is copied, and stays.

The numbered scenarios are those of docs/internals/cache.md, section 8.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import cast

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache.layer_interface import LayerState
from runner.cache.layers import adapt
from runner.cache.layers.adapter import LayerAdapter
from runner.cache.layers.snapshot import Ledger, complete, own

from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache  # isort: skip

from tests.lib.layer_caches import (
    ENTRY,
    KINDS,
    MOVED,
    SLICEABLE,
    STATES,
    TAILS,
    Appending,
    Unknown,
    adapted,
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

SLACK = 16384  # what an array may be larger than its bytes


@pytest.fixture(autouse=True)
def exact_buffers() -> Iterator[None]:
    """Keeps MLX from reusing freed buffers, which may be two pages larger than each array in them."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


def forward(state: LayerState, first: int) -> None:
    """A write of one token, without a look at what is there."""
    assert isinstance(state, LayerAdapter)
    cast("Appending", state.layer).update_and_fetch(positions(first, 1), -positions(first, 1))
    mx.eval(state.arrays())


# --- copies


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32])
@pytest.mark.parametrize(
    ("cut", "heads"),
    [
        (slice(8, 16), 8),  # strided
        (slice(8, 16), 1),  # contiguous already
        (slice(0, 508), 1),  # contiguous, with so little to spare that mx.contiguous would share it
        (slice(0, 512), 8),  # all of it
    ],
)
def test_a_copy_keeps_no_other_buffer_alive(cut: slice, heads: int, dtype: mx.Dtype) -> None:  # scenario 45
    before = held_bytes()
    parent = (mx.zeros((1, heads, 512, 64)) + 1).astype(dtype)
    mx.eval(parent)
    copy = own(parent[:, :, cut])
    mx.eval(copy)
    together = held_bytes() - before
    assert together >= parent.nbytes + copy.nbytes
    del parent
    alone = held_bytes() - before
    assert copy.nbytes <= alone <= copy.nbytes + SLACK


@pytest.mark.usefixtures("exact_bytes")
def test_a_copy_of_a_whole_buffer_is_another_buffer() -> (
    None
):  # scenario 45: nothing is there to be released, but much to share
    parent = mx.zeros((1, 1, 512, 64)) + 1
    mx.eval(parent)
    before = held_bytes()
    copy = own(parent)
    mx.eval(copy)
    assert held_bytes() >= before + copy.nbytes


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("kind", ["plain", "window", "generic", "chunk", "arrays"])
def test_what_is_copied_out_keeps_no_buffer_alive(kind: str, heads: int) -> None:  # scenarios 45 and 73
    """Two heads or one, much to spare or a little: the bytes counted are the bytes held."""
    fresh = {"window": RotatingKVCache(4096), "chunk": ChunkedKVCache(4096), "generic": Unknown(), "plain": KVCache()}
    layer_cache = fresh.get(kind) or ArraysCache(2)
    state = adapted(layer_cache)
    entries = mx.zeros((1, heads, 4090, 64)) + 1
    mx.eval(entries)
    if isinstance(layer_cache, ArraysCache):
        layer_cache[0], layer_cache[1] = entries[:, :, -3:], entries[:, :, :4080]  # as convolutions leave them
    else:
        cast("Appending", layer_cache).update_and_fetch(entries, -entries)
    state.advance(4090)
    mx.eval(state.arrays())
    del entries
    snapshot = taken(state)
    complete(state.page_out())
    own_bytes, buffers = snapshot.nbytes, state.nbytes
    together = held_bytes()
    state.reset()
    assert together - held_bytes() >= buffers  # all that the layer held: it shared nothing
    assert ledger(state) == (1, own_bytes)
    before = held_bytes()
    snapshot.close()
    assert own_bytes <= before - held_bytes() <= own_bytes + SLACK


@pytest.mark.parametrize("kind", SLICEABLE)
def test_copying_out_is_evaluated_at_once(kind: str) -> None:
    """Else the copy would hold the live buffer, and the next write into that would copy all of it."""
    state = layer(kind)
    write(state, 4096)
    snapshot = taken(state, 4000)
    state.rewind(4000)
    complete(state.page_out())
    assert snapshot.nbytes == ledger(state)[1] > 0
    buffers = state.nbytes
    after, peak = allocated(lambda: forward(state, 4000))
    assert after <= SLACK
    if kind != "exact":  # which makes new buffers at every write
        assert peak <= buffers // 10


# --- live


@pytest.mark.parametrize("kind", KINDS)
def test_a_live_snapshot_costs_nothing(kind: str) -> None:  # scenarios 32 and 24
    state = layer(kind)
    write(state, 6)
    mx.eval(state.arrays())

    def work() -> None:
        snapshot = taken(state)
        if kind not in STATES:
            head, rest = snapshot.split(4)
            assert head is not None
            assert ledger(state) == (2, 0)
            whole = rest.after(head)
            assert whole is not None
            snapshot = whole
        if kind in ("plain", "quantized"):  # the others have no room behind their offset
            state.rewind(2)
            state.rewind(0)
            state.restore([snapshot])
        assert snapshot.live
        assert ledger(state) == (1, 0)
        snapshot.close()

    after, peak = allocated(work)
    assert (after, peak) == (0, 0)
    assert ledger(state) == (0, 0)
    assert held(state) == list(range(6))


def test_nothing_is_no_snapshot() -> None:
    for kind, make in KINDS.items():
        state = adapted(make())
        assert state.snapshot(0, 0) is None
        write(state, 4)
        assert state.snapshot(4, 4) is None, kind
        assert state.snapshot(0, 5) is None, kind
        assert state.sliceable == (state.snapshot(0, 3) is not None), kind


# --- copied out, and back


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_write_copies_out_what_it_destroys(kind: str) -> None:
    """A state is destroyed by any write; slices only by writes at an offset before their end."""
    state = layer(kind)
    write(state, 6)
    snapshot = taken(state)
    if state.sliceable:
        write(state, 2)
        assert snapshot.live
        state.rewind(6)
        write(state, 1)
        assert snapshot.live
        state.rewind(5)
    write(state, 1, first=500)
    assert not snapshot.live
    assert kept(snapshot) == list(range(6))
    assert ledger(state) == (1, snapshot.nbytes)


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("kind", MOVED)
def test_a_restore_moves_the_bytes(kind: str) -> None:
    """The layer is restored bit by bit after another conversation; then only the layer holds the bytes."""
    state = layer(kind)
    write(state, 6)
    snapshot = paged_out(state)
    assert (snapshot.start, snapshot.stop) == (0 if state.sliceable else 5, 6)
    write(state, 7, first=100)
    assert held(state) == list(range(100, 107))
    state.reset()
    before = held_bytes()
    state.restore([snapshot])
    assert (state.offset, held(state)) == (6, list(range(6)))
    assert snapshot.live
    assert ledger(state) == (1, 0)
    mx.eval(state.arrays())
    assert held_bytes() - before <= state.nbytes + SLACK
    # and out again, by the write that follows: what it says now must not be seen in it
    if state.sliceable:
        state.rewind(0)
    write(state, 3, at_once=False, first=900)
    assert not snapshot.live
    state.reset()
    state.restore([snapshot])
    assert held(state) == list(range(6))
    assert write(state, 1)[-7:] == list(range(7))


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("kind", TAILS)
def test_a_restore_of_a_tail_copies_it(kind: str) -> None:
    """Others on the way down need it too. The copy shares nothing, even where the snapshot has all that is needed: else
    the first write would have to copy it again."""
    fresh = {"window": RotatingKVCache(4096), "chunk": ChunkedKVCache(4096)}
    state = adapted(fresh[kind])
    write(state, 4095)
    snapshot = paged_out(state)
    size = snapshot.nbytes
    write(state, 7, first=100)
    state.reset()
    before = held_bytes()
    state.restore([snapshot])
    assert state.nbytes == size == 4095 * ENTRY
    assert held_bytes() - before >= size
    assert (snapshot.live, snapshot.nbytes, ledger(state)) == (False, size, (1, size))
    del before
    assert write(state, 3, first=900) == [*range(4095), 900, 901, 902]
    assert kept(snapshot) == list(range(4095))
    state.reset()
    state.restore([snapshot])
    assert (state.offset, held(state)) == (4095, list(range(4095)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_ledger_counts_at_every_step(kind: str) -> None:  # scenario 24
    state = layer(kind)
    write(state, 6)
    first = taken(state)
    assert ledger(state) == (1, 0)
    second = taken(state)
    assert ledger(state) == (2, 0)
    if state.sliceable:
        state.rewind(0)
    complete(state.page_out())
    assert first.nbytes == second.nbytes > 0
    assert ledger(state) == (2, 2 * first.nbytes)
    complete(state.page_out())  # they are out already: counted once
    assert ledger(state) == (2, 2 * first.nbytes)
    size = first.nbytes
    state.reset()
    state.restore([second])
    left = size if kind in TAILS else 0
    assert ledger(state) == (2, size + left)
    first.close()
    assert (ledger(state), first.nbytes) == ((1, left), 0)
    second.close()
    assert ledger(state) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_closed_is_not_copied_out(kind: str) -> None:  # scenario 24
    state = layer(kind)
    write(state, 6)
    taken(state).close()
    if state.sliceable:
        state.rewind(0)
    assert state.page_out() == []
    assert ledger(state) == (0, 0)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_closed_once(kind: str, live: bool) -> None:
    state = layer(kind)
    write(state, 4)
    snapshot = taken(state) if live else paged_out(state)
    snapshot.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed before"):
            snapshot.close()
    assert ledger(state) == (0, 0)
    with pytest.raises(RuntimeError, match="owns nothing"):
        layer(kind).restore([snapshot])


@pytest.mark.parametrize("kind", [*TAILS, *STATES])
def test_what_is_live_is_not_overwritten(kind: str) -> None:
    """By a snapshot from elsewhere, by itself, or by going back."""
    state = layer(kind)
    write(state, 3)
    older = taken(state)
    write(state, 3)
    newer = taken(state, 3)
    for snapshots in ([older], [newer], [older, newer]):
        with pytest.raises(RuntimeError, match="1 snapshots that are live"):
            state.restore(snapshots)
    if kind in TAILS:
        with pytest.raises(RuntimeError, match="1 snapshots that are live"):
            state.rewind(3)
    assert (newer.live, state.offset, held(state)) == (True, 6, list(range(6)))
    state.rewind(6)  # moves nothing
    assert newer.live
    complete(state.page_out())
    state.restore([older])
    assert held(state) == [0, 1, 2]


# --- cut and joined


@pytest.mark.usefixtures("exact_bytes")
def test_a_cut_lets_go_of_the_whole() -> None:
    """Each half owns its bytes, even if the other is closed."""
    state = adapted(KVCache())
    write(state, 4096)
    whole = paged_out(state)
    size = whole.nbytes
    before = held_bytes()
    first, second = whole.split(64)
    assert first is not None
    after = held_bytes() - before
    assert abs(after) <= SLACK
    assert (first.nbytes, second.nbytes) == (64 * ENTRY, size - 64 * ENTRY)
    assert ledger(state) == (2, size)
    second.close()
    assert before - held_bytes() >= size - 64 * ENTRY - SLACK
    assert kept(first) == list(range(64))


@pytest.mark.parametrize("at", [-1, 0, 30, 31])
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("kind", SLICEABLE)
def test_a_cut_lies_within(kind: str, live: bool, at: int) -> None:  # scenario 18
    state = layer(kind)
    write(state, 30)
    snapshot = taken(state) if live else paged_out(state)
    with pytest.raises(ValueError, match="cannot cut"):
        snapshot.split(at)
    assert (snapshot.start, snapshot.stop, ledger(state)[0]) == (0, 30, 1)


# --- several layers, one for each session


def pair(kind: str) -> tuple[LayerState, LayerState]:
    """Two fresh layers of a kind, whose snapshots one ledger counts."""
    shared = Ledger()
    first, second = (adapt(KINDS[kind](), shared) for _ in range(2))
    return first, second


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_live_in_another_layer_is_copied(kind: str) -> None:
    """It stays live there, and both layers go on, each in its own way."""
    home, other = pair(kind)
    write(home, 6)
    snapshot = taken(home)
    other.restore([snapshot])
    assert (snapshot.live, list(home.live), list(other.live)) == (True, [snapshot], [])
    assert ledger(home) == (1, 0)
    assert (other.offset, held(other), held(home)) == (6, list(range(6)), list(range(6)))
    assert write(other, 1, first=900)[-7:] == [*range(6), 900]
    assert (snapshot.live, home.offset, held(home)) == (True, 6, list(range(6)))
    assert write(home, 1)[-7:] == list(range(7))
    if home.sliceable:
        home.rewind(3)
        write(home, 1, first=500)
    assert not snapshot.live
    assert kept(snapshot) == list(range(6))
    assert ledger(home) == (1, snapshot.nbytes)
    assert held(other)[-7:] == [*range(6), 900]


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied_from_another_layer_shares_nothing(kind: str) -> None:
    larger = {"window": lambda: RotatingKVCache(4096), "chunk": lambda: ChunkedKVCache(4096)}
    home, other = (adapted(larger.get(kind, KINDS[kind])()) for _ in range(2))
    write(home, 4000)
    taken(home)
    before, size = held_bytes(), home.nbytes
    other.restore(home.live)
    both = held_bytes()
    assert abs(both - before - other.nbytes) <= SLACK
    home.discard()
    assert abs(both - held_bytes() - size) <= SLACK
    assert held(other) == list(range(4000))


@pytest.mark.parametrize("kind", SLICEABLE)
def test_spans_from_everywhere_make_one_layer(kind: str) -> None:
    """Live elsewhere, bytes of their own, live here before the others and live here behind them."""
    home, other = pair(kind)
    write(home, 9)
    first, second, third = (taken(home, at, at + 3) for at in (0, 3, 6))
    other.restore([first])
    write(other, 3)
    mine = taken(other, 3)
    other.rewind(3)
    other.restore([mine, third])  # here already, and elsewhere
    assert (other.offset, held(other), list(other.live)) == (9, list(range(9)), [mine])
    other.rewind(0)
    other.restore([first, mine, third])  # elsewhere, here but in the way, and elsewhere
    assert (other.offset, held(other), list(other.live)) == (9, list(range(9)), [mine])
    assert ledger(home) == (4, 0)
    home.rewind(3)
    write(home, 1, first=500)
    assert ledger(home) == (4, second.nbytes + third.nbytes)
    other.rewind(0)
    other.restore([first, second, third])  # elsewhere, and twice bytes of their own
    assert (other.offset, held(other), second.live, third.live) == (9, list(range(9)), True, True)
    assert list(home.live) == [first]
    assert held(home) == [0, 1, 2, 500]
    assert ledger(home)[1] == mine.nbytes > 0


@pytest.mark.parametrize("kind", TAILS)
def test_a_tail_is_put_together_from_everywhere(kind: str) -> None:
    home, other = pair(kind)
    write(home, 6)
    first = taken(home)
    write(home, 1)
    second = taken(home, 6)
    other.restore([first, second])
    assert (first.live, second.live, other.offset, held(other)) == (False, True, 7, list(range(7)))
    assert list(home.live) == [second]
    write(other, 1, first=900)
    assert held(home) == list(range(7))


@pytest.mark.parametrize("kind", SLICEABLE)
def test_what_is_live_in_two_layers_is_joined_to_bytes(kind: str) -> None:
    home, other = pair(kind)
    write(home, 3)
    first = taken(home)
    other.restore([first])
    write(other, 3)
    whole = taken(other, 3).after(first)
    assert whole is not None
    assert (whole.live, kept(whole), ledger(home)) == (False, list(range(6)), (1, whole.nbytes))
    assert (list(home.live), list(other.live)) == ([], [])
    assert (held(home), held(other)) == (list(range(3)), list(range(6)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_that_owns_its_bytes_holds_no_layer(kind: str) -> None:
    """The layers of a session end with it; what was cut from them in the trie stays."""
    state = layer(kind)
    write(state, 6)
    snapshot = paged_out(state)
    _, rest = snapshot.split(4) if kind not in STATES else (None, snapshot)
    gone = weakref.ref(state)
    del state
    gc.collect()
    assert gone() is None
    assert rest.stop == 6
