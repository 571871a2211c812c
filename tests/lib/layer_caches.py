"""Layer caches of mlx-lm whose entries carry their own positions, so that a reader can tell which tokens they are."""

from collections.abc import Callable
from typing import Protocol, cast

import mlx.core as mx

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache.layer_interface import Snapshot
from runner.cache.layers import adapt
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.snapshot import LayerSnapshot, Ledger, complete
from runner.kv_bits.hadamard import HadamardKVCache, rotated

from mlx_lm.models.cache import (  # isort: skip
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)

HEADS = 2
WIDTH = 32  # the least that can be quantized
ENTRY = 2 * HEADS * WIDTH * 4  # bytes of a token in a layer that is not quantized

Buffer = mx.array | tuple[mx.array, ...] | list[mx.array]


class Appending(Protocol):
    """A layer cache that keys and values are written to."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Buffer, Buffer]: ...

    def keys_and_values(self) -> tuple[Buffer, Buffer]: ...


class Ring(Protocol):
    """RotatingKVCache's own idea of the order of time."""

    keys: mx.array
    values: mx.array
    offset: int
    max_size: int

    def _temporal_order(self, v: mx.array) -> mx.array: ...


class Unknown(KVCache):
    """A subclass, which only the generic adapter serves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


SLICEABLE: dict[str, Callable[[], object]] = {
    "plain": KVCache,
    "quantized": lambda: HadamardKVCache(group_size=WIDTH, bits=8),
    "exact": ConcatenateKVCache,
}
TAILS: dict[str, Callable[[], object]] = {"window": lambda: RotatingKVCache(8), "chunk": lambda: ChunkedKVCache(8)}
STATES: dict[str, Callable[[], object]] = {"arrays": lambda: ArraysCache(2), "generic": Unknown}
MOVED = {**SLICEABLE, **STATES}  # whose restore moves the bytes; that of a tail copies
KINDS = {**SLICEABLE, **TAILS, **STATES}


def adapted(layer_cache: object) -> LayerState:
    """Returns its adapter, with a ledger of its own."""
    return adapt(layer_cache, Ledger())


def layer(kind: str) -> LayerState:
    """Returns a fresh layer of a kind in KINDS."""
    return adapted(KINDS[kind]())


def ledger(state: LayerState) -> tuple[int, int]:
    """Returns the number of open snapshots of the layer, and the bytes that they own."""
    return state.ledger.count, state.ledger.nbytes


def positions(first: int, count: int) -> mx.array:
    """Returns entries [1, HEADS, count, WIDTH] that carry their position. Equal entries, rotated, are one number
    and zeros, which are quantized almost exactly."""
    column = mx.arange(first, first + count, dtype=mx.float32)[:, None]
    return mx.contiguous(mx.broadcast_to(column, (1, HEADS, count, WIDTH)))


def write(state: LayerState, count: int, at_once: bool = True, first: int | None = None) -> list[int]:
    """Runs a forward over `count` tokens, or `count` forwards, as a sequence does: what they would destroy is paged out
    before. `first` is the position that the first token claims, if not its own. Returns the positions that the last
    forward could attend to."""
    read: list[int] = []
    begin = state.offset if first is None else first
    for length in [count] if at_once else [1] * count:
        complete(state.page_out())
        read = append(state.layer, positions(begin, length))
        mx.eval(state.arrays())
        state.count_tokens(length)
        begin += length
    return read


def write_unseen(state: LayerState, first: int) -> None:
    """Writes one token, with no regard to live snapshots."""
    cast("Appending", state.layer).update_and_fetch(positions(first, 1), -positions(first, 1))
    mx.eval(state.arrays())


def append(layer_cache: object, entries: mx.array) -> list[int]:
    """Writes the entries of a forward; returns the positions that it could attend to."""
    if isinstance(layer_cache, ArraysCache):
        # A state that is all it has seen.
        old = [entries[:, :, :0] if state is None else state for state in (layer_cache[0], layer_cache[1])]
        layer_cache[0], layer_cache[1] = (
            mx.concatenate(pair, axis=-2) for pair in ([old[0], entries], [old[1], -entries])
        )
        return _pairs((layer_cache[0], layer_cache[1]))
    if isinstance(layer_cache, ChunkedKVCache):
        layer_cache.maybe_trim_front()
    return _pairs(cast("Appending", layer_cache).update_and_fetch(entries, -entries))


def held(state: LayerState) -> list[int]:
    """Returns the positions that the next forward over several tokens finds, oldest first."""
    if isinstance(state.layer, RotatingKVCache):
        ring = cast("Ring", state.layer)
        both = ring._temporal_order(ring.keys), ring._temporal_order(ring.values)
        return _pairs(both)[-min(ring.offset, ring.max_size) :]
    if isinstance(state.layer, ArraysCache):
        return _pairs((state.layer[0], state.layer[1]))
    return _pairs(cast("Appending", state.layer).keys_and_values())


def taken(state: LayerState, start: int = 0, stop: int | None = None) -> Snapshot:
    """Returns a snapshot that must exist, up to the present offset by default."""
    snapshot = state.snapshot(start, state.offset if stop is None else stop)
    assert snapshot is not None
    assert snapshot.live
    assert snapshot.nbytes == 0
    return snapshot


def paged_out(state: LayerState) -> Snapshot:
    """Returns a snapshot up to the present offset that owns its bytes; the layer is empty afterwards."""
    snapshot = taken(state)
    if state.sliceable:
        state.rewind(0)
    complete(state.page_out())
    state.reset()
    assert not snapshot.live
    return snapshot


def kept(snapshot: Snapshot | None) -> list[int]:
    """Returns the positions in the bytes that a snapshot owns."""
    assert isinstance(snapshot, LayerSnapshot)
    content = snapshot.owned.content
    if isinstance(content, dict):
        return _pairs((content["keys"][..., : snapshot.stop, :], content["values"][..., : snapshot.stop, :]))
    arrays = cast("list[mx.array]", content)
    half = len(arrays) // 2
    return _pairs((arrays[:half], arrays[half:]))


def entries(state: LayerState, start: int, stop: int) -> list[int]:
    """Returns the positions in a layer's own copy of some tokens."""
    arrays = state.copy_tokens(start, stop).arrays
    half = len(arrays) // 2
    return _pairs((arrays[:half], arrays[half:]))


def allocated(work: Callable[[], object]) -> tuple[int, int]:
    """Returns the bytes that MLX holds more after some work, and held more meanwhile."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = work()
    mx.synchronize()
    after, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
    del result
    return after, max(0, peak)


def _pairs(both: tuple[Buffer, Buffer]) -> list[int]:
    keys, values = _plain(both[0]), _plain(both[1])
    assert mx.array_equal(keys, -values)
    assert mx.array_equal(keys, mx.broadcast_to(keys[:, :1, :, :1], keys.shape))
    return cast("list[int]", keys[0, 0, :, 0].astype(mx.int32).tolist())


def _plain(buffer: Buffer) -> mx.array:
    if isinstance(buffer, mx.array):
        return buffer
    if len(buffer) == 1:
        return buffer[0]
    weights, scales, biases = buffer
    return mx.round(rotated(mx.dequantize(weights, scales, biases, group_size=WIDTH, bits=8)))
