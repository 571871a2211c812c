"""The adapters, one class of mlx-lm at a time.

The layers here hold their own positions as keys and values, so that what is read back names itself.

Guards, the mutation each is there for, and the test that kills it:

* own bytes            own() returns x[...] or mx.contiguous(x)     test_a_copy_keeps_no_other_buffer_alive
* evaluated            OwnedSnapshot without mx.eval                test_a_snapshot_is_evaluated
* no shared objects    restore puts the snapshot's own arrays       test_a_restored_layer_shares_nothing_...
* base                 KV restore without the offset check          test_keys_and_values_need_what_comes_before_them
* exact state          CountedState.restore at any offset           test_a_recurrent_state_is_restored_at_its_offset...
* window size          snapshot of the whole buffer                 test_a_window_snapshot_holds_the_window_only
* exact type           table by isinstance                          test_a_subclass_gets_the_generic_adapter
"""

from collections.abc import Callable
from typing import Protocol, cast

import mlx.core as mx
import pytest

import runner.mlxlm  # noqa: F401
from runner.cache.interface import LayerState, Miss, Snapshot
from runner.cache.layers import adapt, distrust, flatten
from runner.cache.layers.arrays import ArraysState
from runner.cache.layers.chunk import ChunkState
from runner.cache.layers.generic import GenericState
from runner.cache.layers.kv import KVState
from runner.cache.layers.leaf import LeafState
from runner.cache.layers.snapshot import own
from runner.cache.layers.window import WindowState
from runner.cache.stack import LayerStack

from mlx_lm.models.cache import (  # isort: skip
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from tests.cache.driver import forwards_at_once
from tests.cache.tiny import KINDS, VOCAB, tiny


class Appending(Protocol):
    """A layer cache that keys and values are written to."""

    offset: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...

    def keys_and_values(self) -> tuple[mx.array, mx.array]: ...


class Ring(Protocol):
    """RotatingKVCache's own idea of the order of time."""

    keys: mx.array
    offset: int
    max_size: int

    def _temporal_order(self, v: mx.array) -> mx.array: ...


def positions(first: int, count: int) -> mx.array:
    """Entries [1, 2, count, 4] that carry their absolute position."""
    return mx.broadcast_to(mx.arange(first, first + count, dtype=mx.float32)[:, None], (1, 2, count, 4))


def write(leaf: Appending, count: int, at_once: bool = True, first: int | None = None) -> list[int]:
    """A forward over `count` tokens, or that many forwards; returns the positions that the last one could attend to."""
    if isinstance(leaf, ChunkedKVCache):
        leaf.maybe_trim_front()
    begin = leaf.offset if first is None else first
    lengths = [count] if at_once else [1] * count
    keys = positions(0, 0)
    for length in lengths:
        keys, values = leaf.update_and_fetch(positions(begin, length), -positions(begin, length))
        assert mx.array_equal(keys, -values)
        begin += length
    return _read(keys)


def _read(keys: mx.array) -> list[int]:
    return cast("list[int]", keys[0, 0, :, 0].astype(mx.int32).tolist())


def held(state: LayerState) -> list[int]:
    """The positions that the next forward over several tokens finds, oldest first."""
    assert isinstance(state, LeafState)
    if isinstance(state, WindowState):
        ring = cast("Ring", state.leaf)
        return _read(ring._temporal_order(ring.keys))[-min(ring.offset, ring.max_size) :]
    return _read(cast("Appending", state.leaf).keys_and_values()[0])


def taken(state: LayerState, start: int = 0) -> Snapshot:
    """A snapshot that must be there."""
    snapshot = state.snapshot(start)
    assert snapshot is not None
    return snapshot


# --- copies


def test_a_copy_keeps_no_other_buffer_alive() -> None:  # C45
    def kept_alive_by(cut: slice, heads: int, length: int) -> tuple[int, int]:
        before = mx.get_active_memory()
        parent = mx.zeros((1, heads, length, 64)) + 1
        mx.eval(parent)
        copy = own(parent[:, :, cut])
        mx.eval(copy)
        del parent
        return mx.get_active_memory() - before, copy.nbytes

    for cut, heads, length in [
        (slice(8, 16), 8, 512),  # strided
        (slice(8, 16), 1, 512),  # contiguous already
        (slice(0, 508), 1, 512),  # contiguous, with so little to spare that mx.contiguous would share it
        (slice(0, 512), 8, 512),  # all of it
    ]:
        held_bytes, own_bytes = kept_alive_by(cut, heads, length)
        assert own_bytes <= held_bytes <= own_bytes + 16384


def test_a_copy_of_a_whole_buffer_is_another_buffer() -> None:  # C45: memory alone does not tell a shared full buffer
    parent = mx.zeros((1, 1, 512, 64)) + 1
    mx.eval(parent)
    before = mx.get_active_memory()
    copy = own(parent)
    mx.eval(copy)
    assert mx.get_active_memory() >= before + copy.nbytes


def test_a_snapshot_is_evaluated() -> None:
    """Else it would hold the live buffer, and the next write would copy all of it."""
    leaf = KVCache()
    write(leaf, 4096)
    mx.eval(leaf.keys, leaf.values)
    before = mx.get_active_memory()
    snapshot = taken(adapt(leaf), 4000)
    assert before + snapshot.nbytes <= mx.get_active_memory() <= before + snapshot.nbytes + 16384


@pytest.mark.parametrize("kind", ["kv", "window", "chunk", "arrays", "generic"])
def test_a_restored_layer_shares_nothing_with_the_snapshot(kind: str) -> None:
    """In-place writes change the array *object*: the snapshot must not see what is written after a restore."""
    leaves: dict[str, Callable[[], Appending]] = {
        "kv": KVCache,
        "window": lambda: RotatingKVCache(8),
        "chunk": lambda: ChunkedKVCache(8),
        "generic": lambda: _Own(8),
    }
    if kind == "arrays":
        recurrent = ArraysCache(1)
        recurrent[0] = mx.zeros((1, 8))
        state = adapt(recurrent)
        state.advance(8)
        snapshot = taken(state)
        assert state.restore(snapshot, 8)
        recurrent[0][:, 2:5] = 99
        assert state.restore(snapshot, 8)
        assert mx.array_equal(recurrent[0], mx.zeros((1, 8)))
        return
    leaf = leaves[kind]()
    state = adapt(leaf)
    write(leaf, 8)
    state.advance(8)
    snapshot = taken(state)
    for _ in range(2):
        state.reset()
        assert state.restore(snapshot, 8)
        assert held(state) == list(range(8))
        write(leaf, 3, at_once=False, first=900)
        mx.eval(state.arrays())


def test_a_snapshot_is_closed_once() -> None:
    leaf = KVCache()
    write(leaf, 4)
    snapshot = taken(adapt(leaf))
    snapshot.close()
    assert snapshot.nbytes == 0
    with pytest.raises(RuntimeError, match="closed before"):
        snapshot.close()
    with pytest.raises(RuntimeError, match="closed"):
        adapt(KVCache()).restore(snapshot, 4)


# --- keys and values


def test_keys_and_values_need_what_comes_before_them() -> None:  # C26
    leaf = KVCache()
    write(leaf, 10)
    snapshot = taken(adapt(leaf), 5)
    empty = adapt(KVCache())
    assert not empty.restore(snapshot, 10)
    assert (empty.offset, empty.empty) == (0, True)


def test_keys_and_values_come_back_as_they_were() -> None:  # C27
    leaf = KVCache()
    state = adapt(leaf)
    write(leaf, 300)
    snapshot = taken(state)
    assert (snapshot.start, snapshot.stop) == (0, 300)
    assert snapshot.nbytes == 2 * 2 * 300 * 4 * 4
    for to in (300, 299, 256, 1):
        state.reset()
        assert state.restore(snapshot, to)
        assert held(state) == list(range(to))
        assert write(leaf, 1)[-1] == to
    state.reset()
    for to in (301, -1):
        assert not state.restore(snapshot, to)
    assert state.empty


def test_nothing_new_is_no_snapshot() -> None:
    leaf = KVCache()
    state = adapt(leaf)
    assert state.snapshot(0) is None
    write(leaf, 4)
    assert state.snapshot(4) is None


def test_both_halves_of_a_cut_are_restored_one_after_the_other() -> None:  # C28
    leaf = KVCache()
    state = adapt(leaf)
    write(leaf, 300)
    whole = taken(state)
    first, second = state.split(whole, 120)
    assert first is not None
    assert (first.start, first.stop, second.start, second.stop) == (0, 120, 120, 300)
    with pytest.raises(RuntimeError):
        whole.close()
    state.reset()
    assert not state.restore(second, 300)
    assert state.restore(first, 120)
    assert state.restore(second, 250)
    assert held(state) == list(range(250))


def test_a_restore_drops_what_was_there_behind_it() -> None:
    leaf = KVCache()
    state = adapt(leaf)
    write(leaf, 20)
    snapshot = taken(state, 10)
    state.rewind(10)
    write(leaf, 50, first=500)
    assert state.restore(snapshot, 20)
    assert held(state) == list(range(20))


def test_halves_merge_into_the_whole() -> None:  # C28
    leaf = KVCache()
    state = adapt(leaf)
    write(leaf, 30)
    first, second = taken(state, 0), taken(state, 20)
    with pytest.raises(ValueError, match="do not meet"):
        state.merge(first, second)
    head, tail = state.split(first, 20)
    tail.close()
    merged = state.merge(head, second)
    assert merged is not None
    assert (merged.start, merged.stop, merged.nbytes) == (0, 30, 2 * 2 * 30 * 4 * 4)
    state.reset()
    assert state.restore(merged, 30)
    assert held(state) == list(range(30))


def test_a_hole_leaves_nothing_of_keys_and_values() -> None:  # C25
    leaf = KVCache()
    state = adapt(leaf)
    write(leaf, 30)
    alone = taken(state, 20)
    assert state.merge(None, alone) is None
    with pytest.raises(RuntimeError, match="closed before"):
        alone.close()
    assert state.merge(None, None) is None


@pytest.mark.parametrize("at", [-1, 0, 30, 31])
@pytest.mark.parametrize("make", [KVCache, lambda: RotatingKVCache(64)])
def test_a_cut_lies_within(make: Callable[[], Appending], at: int) -> None:
    leaf = make()
    state = adapt(leaf)
    write(leaf, 30)
    with pytest.raises(ValueError, match="cannot cut"):
        state.split(taken(state), at)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_keys_and_values_come_back_bit_by_bit(bits: int) -> None:  # C45
    leaf = QuantizedKVCache(group_size=32, bits=bits)
    state = adapt(leaf)
    assert isinstance(state, KVState)
    data = mx.random.normal((1, 2, 300, 64))
    before = leaf.update_and_fetch(data, -data)
    first, second = state.split(taken(state), 100)
    assert first is not None
    state.reset()
    assert state.restore(first, 100)
    assert state.restore(second, 300)
    after = leaf.keys_and_values()
    for a, b in zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True):
        assert mx.array_equal(a, b)
    leaf.update_and_fetch(data, data)
    assert state.offset == 600


# --- windows


def test_a_full_ring_does_not_go_back() -> None:  # C33
    leaf = RotatingKVCache(4)
    state = adapt(leaf)
    write(leaf, 10, at_once=False)
    assert not state.rewind(3)
    assert not state.rewind(9)
    assert state.rewind(10)
    assert not state.rewind(11)
    assert state.refusal == Miss.WINDOW_PASSED
    snapshot = taken(state)
    write(leaf, 5, at_once=False)
    assert state.restore(snapshot, 10)
    assert held(state) == [6, 7, 8, 9]
    write(leaf, 1)
    assert held(state) == [7, 8, 9, 10]
    assert not state.restore(snapshot, 9)
    assert not state.restore(snapshot, 11)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("count", [1, 4, 31, 32, 33, 40, 63, 64, 65, 100])
def test_a_window_snapshot_holds_the_window_only(count: int, at_once: bool) -> None:  # C34, C35
    """After a long prefill mlx-lm's buffer holds all of it."""
    leaf = RotatingKVCache(32)
    state = adapt(leaf)
    write(leaf, count, at_once)
    window = list(range(max(0, count - 32), count))
    snapshot = taken(state)
    assert snapshot.nbytes == 2 * 2 * len(window) * 4 * 4
    for at_once_again in (True, False):
        state.reset()
        assert state.restore(snapshot, count)
        assert held(state) == window
        write(leaf, 5, at_once_again)
        assert held(state) == list(range(max(0, count - 27), count + 5))


@pytest.mark.parametrize("said", [0, 3])
@pytest.mark.parametrize("kept", [0, 2])
def test_a_window_that_keeps_its_first_tokens_comes_back_with_them(kept: int, said: int) -> None:
    leaf = RotatingKVCache(8, keep=kept)
    state = adapt(leaf)
    write(leaf, 20)
    write(leaf, said, at_once=False)
    stop = 20 + said
    snapshot = taken(state)
    state.reset()
    assert state.restore(snapshot, stop)
    assert held(state) == [*range(kept), *range(stop - 8 + kept, stop)]
    write(leaf, 2, at_once=False)
    assert sorted(held(state)) == [*range(kept), *range(stop - 6 + kept, stop + 2)]


def test_a_chunk_after_growth_in_decode_finds_no_padding() -> None:  # C38
    leaf = RotatingKVCache(512)
    state = adapt(leaf)
    write(leaf, 5)
    write(leaf, 2, at_once=False)
    snapshot = taken(state)
    state.reset()
    assert state.restore(snapshot, 7)
    assert write(leaf, 1, at_once=False) == list(range(8))
    assert state.restore(snapshot, 7)
    assert write(leaf, 3) == list(range(10))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_rewound_window_finds_no_stale_tail(at_once: bool) -> None:  # C39
    leaf = RotatingKVCache(16)
    state = adapt(leaf)
    write(leaf, 8, at_once)
    assert state.rewind(2)
    assert held(state) == [0, 1]
    write(leaf, 3, at_once, first=9)
    assert held(state) == [0, 1, 9, 10, 11]
    assert state.rewind(0)
    assert state.empty
    assert write(leaf, 2) == [0, 1]


def test_an_unfilled_window_is_restored_at_any_earlier_token() -> None:
    leaf = RotatingKVCache(16)
    state = adapt(leaf)
    write(leaf, 16)
    snapshot = taken(state)
    for to in (16, 15, 1, 0):
        assert state.restore(snapshot, to)
        assert state.offset == to
        assert write(leaf, 2)[-min(to + 2, 16) :] == list(range(max(0, to - 14), to + 2))
    assert not state.restore(snapshot, -1)


def test_a_window_is_not_cut_and_the_later_one_stays() -> None:  # C18, C25
    leaf = RotatingKVCache(4)
    state = adapt(leaf)
    write(leaf, 10)
    snapshot = taken(state)
    nothing, rest = state.split(snapshot, 5)
    assert nothing is None
    assert rest is snapshot
    assert (rest.start, rest.stop) == (5, 10)
    write(leaf, 5)
    later = taken(state, 10)
    assert state.merge(rest, later) is later
    assert (later.start, later.stop) == (5, 15)
    with pytest.raises(RuntimeError, match="closed before"):
        rest.close()
    assert state.merge(None, later) is later
    assert state.merge(later, None) is None


# --- chunks


@pytest.mark.parametrize("count", [5, 16, 17, 40])
def test_a_chunk_comes_back_as_it_was(count: int) -> None:
    leaf = ChunkedKVCache(16)
    state = adapt(leaf)
    write(leaf, count // 2)
    write(leaf, count - count // 2)
    snapshot = taken(state)
    assert snapshot.nbytes <= 2 * 2 * 16 * 4 * 4
    state.reset()
    assert state.restore(snapshot, count)
    assert (state.offset, held(state)) == (count, list(range(max(0, count - 16), count)))
    assert write(leaf, 1)[-1] == count


def test_a_chunk_goes_back_while_its_start_is_there() -> None:  # C14
    leaf = ChunkedKVCache(16)
    state = adapt(leaf)
    write(leaf, 40)
    write(leaf, 4)
    assert leaf.start_position == 24
    for to in (31, 24, 16, 0, -1, 45):
        assert not state.rewind(to)
        assert state.offset == 44
    snapshot = taken(state)
    assert not state.restore(snapshot, 31)
    assert state.restore(snapshot, 33)
    assert held(state) == [28, 29, 30, 31, 32]
    assert write(leaf, 2)[-2:] == [33, 34]
    assert state.rewind(32)
    assert state.offset == 32


# --- recurrent states and unknown classes


def _recurrent(seen: int) -> ArraysState:
    leaf = ArraysCache(2)
    state = adapt(leaf)
    assert isinstance(state, ArraysState)
    leaf[0] = mx.full((1, 3, 4), float(seen))
    state.advance(seen)
    return state


def test_a_recurrent_state_is_restored_at_its_offset_only() -> None:  # C41
    state = _recurrent(7)
    snapshot = taken(state, 3)
    leaf = state.leaf
    leaf.cache[0], leaf.cache[1] = mx.zeros((1, 3, 4)), mx.zeros((1,))
    state.advance(5)
    for to in (3, 6, 8):
        assert not state.restore(snapshot, to)
        assert state.offset == 12
    assert not state.rewind(7)
    assert state.rewind(12)
    assert state.refusal == Miss.NON_TRIMMABLE
    assert state.restore(snapshot, 7)
    assert state.offset == 7
    assert leaf.cache[1] is None
    assert leaf.cache[0] is not None
    assert mx.array_equal(leaf.cache[0], mx.full((1, 3, 4), 7.0))


def test_a_recurrent_state_is_not_cut() -> None:  # C41
    state = _recurrent(7)
    nothing, rest = state.split(taken(state), 3)
    assert nothing is None
    assert state.restore(rest, 7)


@pytest.mark.parametrize("adapter", [adapt, GenericState])
def test_a_convolution_state_keeps_no_forward_alive(adapter: Callable[[object], LayerState]) -> None:
    """mamba2's is a slice of what the forward made."""  # C72
    leaf = ArraysCache(1)
    state = adapter(leaf)
    forward = mx.zeros((1, 4000, 64)) + 1
    leaf[0] = forward[:, -3:]
    state.advance(4000)
    mx.eval(leaf[0])
    del forward
    before = mx.get_active_memory()
    snapshot = taken(state)
    assert snapshot.nbytes == 3 * 64 * 4
    assert state.restore(snapshot, 4000)
    mx.eval(state.arrays())
    assert mx.get_active_memory() < before - 900_000


class _Own(KVCache):
    """A subclass that may do as it likes; its own word is not to be trusted."""

    def __init__(self, extra: int) -> None:
        self.keys = self.values = None
        self.offset = 0
        self.listed: list[mx.array | None] = [mx.zeros((extra,)), None]
        self.nested: dict[str, tuple[object, ...]] = {"tuple": (1, mx.ones((2,)))}

    def trim(self, n: int) -> int:
        raise AssertionError(f"asked to trim {n}")

    def is_trimmable(self) -> bool:
        raise AssertionError("asked whether it is trimmable")


def test_a_subclass_gets_the_generic_adapter() -> None:  # C46
    leaf = _Own(8)
    state = adapt(leaf)
    assert isinstance(state, GenericState)
    write(leaf, 10)
    state.advance(10)
    listed = leaf.listed
    snapshot = taken(state)
    assert snapshot.nbytes == sum(x.nbytes for x in state.arrays())
    assert len(state.arrays()) == 4
    assert not state.rewind(9)
    write(leaf, 3)
    state.advance(3)
    listed[0] = mx.full((8,), 5.0)
    assert not state.restore(snapshot, 9)
    assert state.restore(snapshot, 10)
    assert held(state) == list(range(10))
    assert leaf.listed[0] is not None
    assert mx.array_equal(leaf.listed[0], mx.zeros((8,)))
    state.reset()
    assert (state.offset, leaf.offset, leaf.keys) == (0, 0, None)
    assert len(state.arrays()) == 2


def test_an_array_held_twice_and_a_circle_are_copied_once() -> None:
    leaf = _Own(4)
    leaf.listed[1] = leaf.listed[0]
    circle: list[object] = [leaf.listed[0]]
    circle.append(circle)
    leaf.nested["circle"] = tuple(circle)
    state = adapt(leaf)
    state.advance(1)
    assert len(state.arrays()) == 2
    snapshot = taken(state)
    assert snapshot.nbytes == 4 * 4 + 2 * 4
    assert state.restore(snapshot, 1)
    assert leaf.listed[0] is leaf.listed[1]
    assert len(state.arrays()) == 2


def test_the_table_knows_the_classes_of_the_models() -> None:
    found = [type(adapt(leaf)) for leaf in (KVCache(), RotatingKVCache(4), ChunkedKVCache(4), ArraysCache(1))]
    assert found == [KVState, WindowState, ChunkState, ArraysState]


def test_a_distrusted_layer_keeps_its_object_and_forgets_to_the_first_day() -> None:
    leaf = KVCache()
    state = adapt(leaf)
    write(leaf, 10)
    generic = distrust(state, 20)
    assert isinstance(generic, GenericState)
    assert (generic.leaf, generic.offset) == (leaf, 20)
    assert not generic.rewind(10)
    generic.reset()
    assert (leaf.keys, leaf.offset) == (None, 0)


# --- lists of layers


def test_leaves_come_in_the_order_of_the_model_once_and_without_holes() -> None:  # C47
    a, b, c, d = KVCache(), ArraysCache(1), RotatingKVCache(4), KVCache()
    assert list(flatten([CacheList(a, b), None, c, CacheList(CacheList(d), a)])) == [a, b, c, d]


def test_a_reset_keeps_every_object() -> None:  # C47
    inner, outer = KVCache(), ArraysCache(1)
    pair = CacheList(outer, inner)
    stack = LayerStack([pair])
    write(inner, 5)
    outer[0] = mx.zeros((1,))
    stack.advance(5)
    assert stack.offset == 5
    stack.reset()
    assert stack.layers == [pair]
    assert (pair[0], pair[1]) == (outer, inner)
    assert (inner.offset, inner.keys, outer[0], stack.offset, stack.nbytes) == (0, None, None, 0, 0)


# --- whole models


@pytest.mark.parametrize("adapter", ["of the class", "generic"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_model_goes_on_where_it_was(kind: str, adapter: str) -> None:  # C46, C48
    """41 tokens, a snapshot, 30 foreign tokens, back: bit-equal to a run with the same forwards (a window that is read
    token by token comes back in another order of its sums, so the first forward after the restore is a chunk)."""
    model = tiny(kind)
    prompt, foreign = [(i * i + 3 * i) % VOCAB for i in range(60)], [(7 * i) % VOCAB for i in range(30)]
    layers = model.make_layers()
    make = GenericState if adapter == "generic" else adapt
    states = [make(leaf) for leaf in flatten(layers)]

    def forward(tokens: list[int]) -> mx.array:
        logits = model.model(mx.array([tokens]), cache=layers)[0, -1]
        for state in states:
            state.advance(len(tokens))
        mx.eval([logits, *(x for state in states for x in state.arrays())])
        return logits

    forward(prompt[:20])
    forward(prompt[20:40])
    forward(prompt[40:41])
    snapshots = [taken(state) for state in states]
    forward(foreign)
    for reset_first in (True, False):
        for state, snapshot in zip(states, snapshots, strict=True):
            if reset_first:
                state.reset()
            assert state.restore(snapshot, 41)
            assert state.offset == 41
        ours = forward(prompt[41:])
        assert mx.array_equal(ours, forwards_at_once(model, prompt, [20, 20, 1, 19])[-1])
