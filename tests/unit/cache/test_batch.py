"""Rows of a batch, in caches whose entries name themselves: what each can attend to, and what it takes home."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from random import Random
from typing import Protocol, cast

import mlx.core as mx
import pytest

from runner.cache.layers import adapt, flatten
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.batched import BatchedLayers, batchable, staying
from runner.cache.layers.rows import LONG_STEP, SHORT_STEP, KVRows
from runner.cache.layers.snapshot import Ledger, complete

from mlx_lm.models.cache import (  # isort: skip
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from tests.lib import layer_caches
from tests.lib.layer_caches import HEADS, WIDTH, adapted, allocated, held, layer, positions, taken, write
from tests.lib.memory import held_bytes

SLACK = 16384  # what an array may be larger than its bytes
WINDOW = 8
WRONG = 10_000  # is added to the position of a token that was not right
WIDE = 300  # a window that grows by steps of 256, so that there is room behind its end


class Attending(Protocol):
    """A batch cache of keys and values, as attention uses it."""

    offset: mx.array

    def make_mask(self, N: int) -> mx.array: ...  # noqa: N803

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]: ...


class Row:
    """The layers of a request, and their adapters."""

    def __init__(self, count: int, chunk: int = 1000) -> None:
        """Has read `count` tokens, `chunk` at a time."""
        self.layers: list[object] = [
            KVCache(),
            None,
            RotatingKVCache(WINDOW),
            CacheList(KVCache(), RotatingKVCache(WIDE)),
        ]
        self.states = [adapt(layer_cache, Ledger()) for layer_cache in flatten(self.layers)]
        for at in range(0, count, chunk):
            self.write(min(chunk, count - at))
        self.waiting = 0
        """The number of tokens that only a batch has seen."""

    def write(self, count: int, at_once: bool = True) -> None:
        """Forwards of the row alone, each of which sees what it should."""
        for state in self.states:
            read = write(state, count, at_once)
            if at_once and count > 1:
                continue  # what a window shows to several tokens is a matter of its mask
            assert sorted(read) == seen(state, state.offset)

    @property
    def position(self) -> int:
        return self.states[0].offset + self.waiting

    def absorb(self, batch: BatchedLayers, row: int) -> None:
        for batch_cache, state in zip(batch.caches, self.states, strict=True):
            complete(state.page_out())
            state.absorb(batch_cache, row, self.waiting)
            state.count_tokens(self.waiting)
            mx.eval(state.arrays())
        self.waiting = 0
        for state in self.states:
            assert held(state) == seen(state, state.offset)
            layer_cache = vars(state)["layer"]
            if isinstance(layer_cache, RotatingKVCache):  # or it would take the rest for another turn of the ring
                assert layer_cache.keys is not None
                assert layer_cache._idx == layer_cache.keys.shape[2] == min(layer_cache.offset, layer_cache.max_size)

    def check(self, count: int) -> None:
        """All layers stand at `count` tokens, and hold what they should."""
        for state in self.states:
            assert (state.offset, held(state)) == (count, seen(state, count))


def seen(state: LayerState, count: int) -> list[int]:
    """The positions that the last of `count` tokens attends to."""
    window = getattr(vars(state)["layer"], "max_size", count)
    return list(range(max(0, count - window), count))


def step(batch: BatchedLayers, rows: Sequence[Row], count: int = 1, right: Sequence[int] = ()) -> None:
    """A forward over `count` tokens of each row, each of which sees what it should; of several, the first ones are
    `right`, and no other one is seen by what follows."""
    right = right or [1] * len(rows)
    masks: dict[object, mx.array] = {}  # by the window: a model makes one for all layers of a kind
    with batch.draft_round(count) if count > 1 else nullcontext():
        for batch_cache, states in zip(batch.caches, zip(*(row.states for row in rows), strict=True), strict=True):
            wrong = (mx.arange(count) >= mx.array([*right])[:, None])[:, None, :, None] * WRONG
            entries = mx.concatenate([positions(row.position, count) for row in rows]) + wrong
            cache = cast("Attending", batch_cache)
            mask = masks.setdefault(getattr(vars(states[0])["layer"], "max_size", None), cache.make_mask(count))
            found = _append(cache, entries, [row.position for row in rows], mask)
            for row, state, read, passed in zip(rows, states, found, right, strict=True):
                assert read[:passed] == [seen(state, row.position + 1 + place) for place in range(passed)]
    if count > 1:
        assert batch.may_accept
        batch.accept(right)
    mx.eval(batch.arrays())
    for row, passed in zip(rows, right, strict=True):
        row.waiting += passed


def _append(cache: Attending, entries: mx.array, offsets: list[int], mask: mx.array) -> list[list[list[int]]]:
    """The write of a forward to all rows; returns the positions that each token of each of them could attend to."""
    count = entries.shape[2]
    assert cache.offset.tolist() == offsets
    keys, values = cache.update_and_fetch(entries, -entries)
    assert mask.shape == (len(offsets), 1, count, keys.shape[2])
    assert mx.array_equal(keys, -values)
    assert mx.array_equal(keys, mx.broadcast_to(keys[:, :1, :, :1], keys.shape))
    written = cast("list[list[int]]", keys[:, 0, :, 0].astype(mx.int32).tolist())
    shown = cast("list[list[list[bool]]]", mask[:, 0].tolist())
    return [
        [sorted(at for at, seen in zip(held, token, strict=True) if seen) for token in tokens]
        for held, tokens in zip(written, shown, strict=True)
    ]


LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 40, 255, 256, 257, 299, 300, 301, 310, 520)


@pytest.mark.parametrize("seed", range(6))
def test_rows_come_and_go(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short and long ones, before and after their windows have wrapped, some of them again and again; now and then
    some layers have more room than others."""
    monkeypatch.setattr("runner.cache.layers.batched._PIECE_BYTES", 1)
    random = Random(seed)
    lengths, chunks = (LENGTHS, (100, 1000)) if seed % 4 == 0 else (LENGTHS[:9], (3, 11, 1000))
    batch: BatchedLayers | None = None
    inside: list[Row] = []
    outside: list[Row] = []
    for _ in range(16):
        if not inside or (len(inside) < 6 and random.random() < 0.4):
            coming = [Row(random.choice(lengths), random.choice(chunks)) for _ in range(random.randint(1, 2))]
            if outside and random.random() < 0.5:
                coming.append(outside.pop())
            if batch is None:
                batch = BatchedLayers([row.layers for row in coming])
            else:
                batch.extend([row.layers for row in coming])
            inside += coming
        assert batch is not None
        assert len(batch) == len(inside)
        for _ in range(random.choice((0, 1, 2, 5, 11))):
            if random.random() < 0.2:
                batch.make_room(len(inside) + random.randint(0, 2), random.choice(lengths))
            count = random.choice((1, 1, 2, 5, 16))
            step(batch, inside, count, [random.randint(0, count) for _ in inside] if count > 1 else ())
        if random.random() < 0.4:
            leaving = {index for index in range(len(inside)) if random.random() < 0.4}
            stay = staying(len(inside), leaving)
            if random.random() < 0.3:
                random.shuffle(stay)
            for index in leaving:
                row = inside[index]
                if row.waiting:
                    row.absorb(batch, index)
                row.check(row.position)
                row.write(random.choice((1, 2, 9)), at_once=random.random() < 0.5)
                outside.append(row)
            inside = [inside[index] for index in stay]
            if inside:
                batch.keep(stay)
            else:
                batch = None


def _filled(count: int, kind: str = "plain") -> LayerState:
    state = adapted(RotatingKVCache(4096)) if kind == "window" else layer(kind)
    write(state, count)
    return state


def _list(state: LayerState) -> list[object]:
    return [vars(state)["layer"]]


def _write_to(batch: BatchedLayers, first: int) -> None:
    """A token for every row, that says it has this position."""
    entries = mx.concatenate([positions(first, 1)] * len(batch))
    for batch_cache in batch.caches:
        if isinstance(batch_cache, ArraysCache):
            batch_cache[0], batch_cache[1] = (
                mx.concatenate([batch_cache[0][:, :, 1:], entries], axis=-2),
                -batch_cache[0],
            )
        else:
            cast("Attending", batch_cache).update_and_fetch(entries, -entries)
    mx.eval(batch.arrays())


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("kind", ["plain", "window", "arrays"])
def test_a_batch_holds_nothing_but_itself(kind: str) -> None:
    """Its `nbytes` are the bytes that it holds; the rows may write to their own buffers."""
    fresh = held_bytes()
    states = [_filled(4000, kind), _filled(4000, kind)]
    rows = held_bytes() - fresh
    batch = BatchedLayers([_list(state) for state in states])
    assert 0 <= held_bytes() - fresh - rows - batch.nbytes <= SLACK
    del states
    _write_to(batch, 4000)
    assert 0 <= held_bytes() - fresh - batch.nbytes <= SLACK
    batch.extend([_list(_filled(4000, kind))])
    assert 0 <= held_bytes() - fresh - batch.nbytes <= SLACK
    _write_to(batch, 4001)
    batch.keep([0, 2])
    assert 0 <= held_bytes() - fresh - batch.nbytes <= SLACK
    _write_to(batch, 4002)
    assert 0 <= held_bytes() - fresh - batch.nbytes <= SLACK
    del batch
    assert held_bytes() == fresh


@pytest.mark.usefixtures("exact_bytes")
def test_padding_is_given_back_with_the_row_that_needed_it() -> None:
    fresh = held_bytes()
    batch = BatchedLayers([_list(_filled(count)) for count in (20, 4000, 10)])
    assert batch.nbytes >= 3 * 4000 * layer_caches.ENTRY
    batch.keep([0, 2])
    assert batch.nbytes <= 2 * (20 + SHORT_STEP) * layer_caches.ENTRY + SLACK
    assert held_bytes() - fresh <= batch.nbytes + SLACK


@pytest.mark.parametrize("kind", ["plain", "window"])
def test_a_row_that_leaves_or_takes_its_place_moves_no_other(kind: str) -> None:
    states = [_filled(2000, kind) for _ in range(8)]
    batch = BatchedLayers([_list(state) for state in states])
    _write_to(batch, 2000)
    row = batch.nbytes // 8
    for leaving in (2, 7, 0):
        stay = staying(8, {leaving})
        assert stay == [7 if row == leaving else row for row in range(7)]
        assert allocated(partial(batch.keep, stay))[1] <= row + SLACK
        assert allocated(lambda: batch.extend([_list(states[0])]))[1] <= 2 * row + SLACK
    assert batch.nbytes == 8 * row


def test_room_is_made_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """For rows that come, longer ones, and tokens to come; after that nothing copies the rows that are there."""
    monkeypatch.setattr("runner.cache.layers.batched._PIECE_BYTES", 1)
    layers, longest = 20, 2000 + 3 * LONG_STEP
    batch = BatchedLayers([[_list(_filled(2000))[0] for _ in range(layers)] for _ in range(8)])
    layer_bytes = batch.nbytes // layers
    for rows, tokens in ((9, 0), (9, longest)):
        for piece in range(layers):
            made, held = list[bool](), batch.nbytes
            _, peak = allocated(lambda: made.append(batch.make_room(rows, tokens)))  # noqa: B023  called at once
            assert made == [piece == layers - 1]
            assert batch.nbytes > held
            assert peak <= 2 * layer_bytes  # less, if old keys are freed before there are new values
    before = batch.nbytes_by_kind
    batch.extend([[_list(_filled(longest))[0] for _ in range(layers)]])
    assert batch.nbytes_by_kind[0] == before[0]


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("count", [1, 200])
@pytest.mark.parametrize("kind", ["plain", "window", "arrays"])
def test_what_is_absorbed_keeps_no_batch_alive(kind: str, count: int) -> None:
    states = [_filled(4000, kind), _filled(4000, kind)]
    batch = BatchedLayers([_list(state) for state in states])
    for index in range(count):
        _write_to(batch, 4000 + index)
    states[1].absorb(batch.caches[0], 1, count)
    states[1].count_tokens(count)
    mx.eval(states[1].arrays())
    assert states[1].offset == 4000 + count
    size = batch.nbytes
    before = held_bytes()
    del batch
    assert before - held_bytes() >= size - SLACK
    after = held_bytes()
    size = states[1].nbytes
    states[1].reset()
    assert size - SLACK <= after - held_bytes() <= size + 4 * SLACK


def test_appending_copies_what_is_new_and_nothing_else() -> None:
    """The row's own buffer has room, as after a step of its own; its thousands of tokens stay where they are."""
    state = _filled(4000)
    batch = BatchedLayers([_list(state), _list(_filled(3))])
    for index in range(5):
        _write_to(batch, 4000 + index)

    def work() -> None:
        state.absorb(batch.caches[0], 0, 5)
        mx.eval(state.arrays())

    _, peak = layer_caches.allocated(work)
    assert peak <= state.nbytes // 10
    assert (state.offset, held(state)) == (4005, list(range(4005)))
    assert state.arrays()[0].shape == (1, HEADS, 4096, WIDTH)


def test_a_layer_that_the_model_does_not_use_stays_empty() -> None:
    """As do holes; and the others find their places."""
    rows = []
    for count in (3, 12):
        row: list[object] = [KVCache(), None, RotatingKVCache(WINDOW), ArraysCache(2), KVCache()]
        write(adapted(row[4]), count)
        rows.append(row)
    batch = BatchedLayers(rows)
    batch.extend([[KVCache(), None, RotatingKVCache(WINDOW), ArraysCache(2), *_list(_filled(7))]])
    batch.keep([0, 2])
    assert batch.layers[1] is None
    assert len(batch.caches) == 4
    states = [adapt(layer_cache, Ledger()) for layer_cache in flatten(rows[0])]
    entries = mx.concatenate([positions(3, 1), positions(7, 1)])
    cast("Attending", batch.caches[3]).update_and_fetch(entries, -entries)
    for batch_cache, state in zip(batch.caches, states, strict=True):
        state.absorb(batch_cache, 0, 1)
    assert [state.empty for state in states] == [True, True, True, False]
    assert held(states[3]) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["window", "arrays"])
def test_what_is_live_is_not_absorbed_over(kind: str) -> None:
    state = _filled(6, kind)
    batch = BatchedLayers([_list(state)])
    _write_to(batch, 6)
    snapshot = taken(state)
    with pytest.raises(RuntimeError, match="1 snapshots that are live"):
        state.absorb(batch.caches[0], 0, 1)
    assert (snapshot.live, state.offset, held(state)) == (True, 6, list(range(6)))
    complete(state.page_out())
    state.absorb(batch.caches[0], 0, 1)
    assert not snapshot.live


def test_the_states_of_a_row_are_its_own_and_counted_by_the_forward() -> None:
    states = [_filled(3, "arrays"), adapted(ArraysCache(2))]
    write(states[1], 3, first=100)
    batch = BatchedLayers([_list(state) for state in states])
    batch.keep([1])
    states[1].absorb(batch.caches[0], 0, 4)
    assert (states[1].offset, held(states[1])) == (3, [100, 101, 102])
    states[1].count_tokens(4)
    assert states[1].offset == 7


def test_which_layers_can_be_batched() -> None:
    for kind in layer_caches.KINDS:
        state = layer(kind)
        assert state.batchable == (kind in ("plain", "window", "arrays"))
        assert batchable([layer("plain"), state]) == state.batchable
        if not state.batchable:
            with pytest.raises(TypeError, match="takes nothing from a batch"):
                state.absorb(KVCache(), 0, 1)
    assert not batchable([adapted(RotatingKVCache(8, 2))])  # keeps its first tokens for good
    assert not batchable([])


def test_a_cache_that_occurs_twice_is_refused() -> None:
    layer_cache = KVCache()
    write(adapted(layer_cache), 3)
    with pytest.raises(ValueError, match="twice"):
        BatchedLayers([[layer_cache, CacheList(layer_cache)], [layer_cache, CacheList(layer_cache)]])


def test_a_state_that_only_some_rows_have_is_refused() -> None:
    """Zeros in its place need not mean the same to a model."""
    some, all_ = ArraysCache(2), ArraysCache(2)
    some[0], all_[0], all_[1] = mx.ones((1, 3)), mx.ones((1, 3)), mx.ones((1, 3))
    with pytest.raises(ValueError, match="lacks a state"):
        BatchedLayers([[some], [all_]])
    with pytest.raises(ValueError, match="lacks a state"):
        BatchedLayers([[all_]]).extend([[some]])


@pytest.mark.parametrize("rows", [[], [0, 2], [-1], [1, 1]])
def test_only_rows_that_are_there_are_kept(rows: list[int]) -> None:
    batch = BatchedLayers([Row(3).layers, Row(5).layers])
    with pytest.raises(ValueError, match="cannot keep the rows"):
        batch.keep(rows)
    assert len(batch) == 2
    batch.keep([1])
    assert len(batch) == 1


@pytest.mark.parametrize(
    ("window", "start", "end", "back"),
    [(100, 90, 155, 1), (100, 90, 155, 20), (100, 90, 155, 64), (400, 85, 406, 64)],
    ids=["one token", "some", "all that it may", "all, of columns that grew when its window was full"],
)
def test_a_row_that_has_gone_back_sees_all_of_its_window(window: int, start: int, end: int, back: int) -> None:
    """Its buffers have grown in between."""

    def entries(start: int, stop: int) -> mx.array:
        return mx.arange(start, stop).astype(mx.float32)[None, None, :, None]

    rows = KVRows(window, [[entries(0, start), entries(0, start)]], [start])
    rows.spare = 64
    for token in range(start, end):
        rows.update_and_fetch(entries(token, token + 1), entries(token, token + 1))
    rows.stand([end - back])
    seen, count = rows.make_mask(1)[0, 0, 0], end - back + 1
    keys, _ = rows.update_and_fetch(entries(count - 1, count), entries(count - 1, count))
    visible = mx.sort(mx.where(seen, keys.flatten(), mx.inf))[: seen.sum().item()]
    assert visible.tolist() == [*range(max(0, count - window), count)]


@pytest.mark.parametrize(("asked", "shown"), [(None, 4), (3, 3), (5, 4)])
def test_a_mask_shows_no_more_than_the_window_keeps(asked: int | None, shown: int) -> None:
    """A row alone has no more of it either."""
    rows, entries = KVRows(4, [[mx.zeros((1, 1, 4, 1))] * 2], [4]), mx.zeros((1, 1, 1, 1))
    for _ in range(9):
        assert mx.sum(rows.make_mask(1, window_size=asked)).item() == shown
        rows.update_and_fetch(entries, entries)
