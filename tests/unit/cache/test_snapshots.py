"""Snapshots of any layer: free while they are live, their own bytes once copied out. Slices and states move when they
come back; a tail is copied, and stays. Scenarios: docs/internals/cache.md, 8.
"""

import gc
import weakref
from typing import cast

import mlx.core as mx
import pytest

from runner.cache.layers import adapt
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.snapshot import Ledger, complete

from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache  # isort: skip

from tests.lib.layer_caches import (
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
    taken,
    write,
    write_unseen,
)
from tests.lib.memory import held_bytes

pytestmark = pytest.mark.usefixtures("exact_bytes")
SLACK = 16384  # what an array may be larger than its bytes


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
    state.count_tokens(4090)
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
    after, peak = allocated(lambda: write_unseen(state, 4000))
    assert after <= SLACK
    if kind != "exact":  # which makes new buffers at every write
        assert peak <= buffers // 10


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_write_copies_out_what_it_destroys(kind: str) -> None:  # scenario 36
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


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(("kind", "begin"), [("window", 2), ("chunk", 8), ("arrays", 9), ("generic", 9)])
def test_nothing_is_cut_off_before_the_first_token(kind: str, begin: int, live: bool) -> None:  # scenarios 41 and 18
    state = layer(kind)
    write(state, 10)
    snapshot = taken(state) if live else paged_out(state)
    assert snapshot.start == begin == state.needs(10)
    for at in (0, 1, begin):
        assert snapshot.split(at) == (None, snapshot)
    for at in (10, 11):
        with pytest.raises(ValueError, match="cannot cut"):
            snapshot.split(at)
    assert (snapshot.start, snapshot.stop, snapshot.live, ledger(state)[0]) == (begin, 10, live, 1)


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
