"""Snapshots to bytes, for files, and back.

A state in a file is a tree of plain values and arrays. The disk cache cannot keep prompts of a model whose layers hold
other values. So no file can contain code.
"""

import json
from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple, cast

import mlx.core as mx

from runner.cache.layer_interface import Snapshot
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.kv import KVState
from runner.cache.layers.snapshot import Owned, SliceSnapshot, StateSnapshot, TailSnapshot, own
from runner.cache.layers.states import CountedState, GenericState
from runner.cache.layers.window import TailState
from runner.cache.sketch import Sketch
from runner.disk.segment import ENTRIES, ITEM_FORMATS, STATE, TAIL, Form, Layers, Tensor
from runner.model.weights.assembly import MLX_DTYPES

_DTYPES = {name: MLX_DTYPES[name] for name in ITEM_FORMATS}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PLAIN = (type(None), bool, int, float, str)
PIECE_BYTES = 1 << 19
"""The size of a piece. With slow memory, the copy of a piece takes a millisecond."""


class SerializeError(TypeError):
    """Raised if a layer holds a value that no file can hold. The text names the value's type."""


class Part(NamedTuple):
    """The entries `span` [low, high) of an array, on the axis of tokens. The whole array if `span` is None."""

    array: mx.array
    span: tuple[int, int] | None = None

    @property
    def dtype(self) -> str:
        """The name of the array's type in files. Raises SerializeError if files have no name for the type."""
        name = _NAMES.get(self.array.dtype)
        if name is None:
            raise SerializeError(f"{self.array.dtype}")
        return name

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.array.shape)
        return shape if self.span is None else (*shape[:-2], self.span[1] - self.span[0], shape[-1])


def describe(state: LayerState) -> str:
    """Returns the classes of a layer and the plain attributes of such a layer when it is new. Layers with equal
    descriptions can hold each other's snapshots."""
    sizes = [
        f"{name}={len(value) if isinstance(value, list) else value}"
        for name, value in sorted(state.fresh.items())
        if isinstance(value, (*_PLAIN, list))
    ]
    return " ".join((type(state).__name__, type(state.layer).__name__, *sizes))


def kind_of(state: LayerState) -> str:
    """Returns the kind of segments that hold this layer's content."""
    if state.sliceable:
        return ENTRIES
    return TAIL if isinstance(state, TailState) else STATE


def parts(snapshot: Snapshot, start: int, stop: int) -> tuple[list[Part], str]:
    """Returns a snapshot's arrays for the tokens [start, stop), and the JSON of a state's other values. Read the arrays
    before the next slice, since they may belong to a live layer. Raises SerializeError."""
    if isinstance(snapshot, StateSnapshot):
        owner = snapshot.owner
        live = owner.content(snapshot.stop) if isinstance(owner, CountedState) else None
        content = snapshot.owned.content if owner is None else live
        arrays: list[mx.array] = []
        tree = _encoded(content, arrays)
        return [Part(array) for array in arrays], json.dumps(tree)
    if isinstance(snapshot, TailSnapshot) and snapshot.live:
        return [Part(array) for array in snapshot.parts(start, stop)], ""
    if not isinstance(snapshot, SliceSnapshot):
        raise SerializeError(type(snapshot).__name__)
    if isinstance(snapshot.owner, KVState):
        return [Part(array, (start, stop)) for array in snapshot.owner.arrays()], ""
    return [Part(array, (start - snapshot.start, stop - snapshot.start)) for array in snapshot.owned.arrays], ""


def forms_of(sketch: Sketch) -> Layers:
    """Returns the forms of a model's layers. Returns no forms if some layer cannot be held by a file."""
    try:
        return {str(slot): _form(state, sketch.tokens) for slot, state in sketch.used.items()}
    except SerializeError:
        return {}


def _form(state: LayerState, tokens: int) -> Form:
    snapshot = state.snapshot(0, tokens)
    if snapshot is None:
        raise SerializeError("nothing")
    found, content = parts(snapshot, snapshot.start, tokens)
    snapshot.close()
    tensors = tuple(Tensor(part.dtype, part.shape) for part in found)
    return Form(kind_of(state), describe(state), tensors, content, isinstance(state, GenericState))


def copy_tokens(part: Part, into: memoryview, first: int, count: int, *, on_device: bool) -> None:
    """Copies a part into `into`, the bytes of an array of `count` tokens, from the token `first` on. With `on_device`,
    first copies the part's entries on the device (on CUDA, a view of an array moves its whole buffer to the host)."""
    array, (low, high) = part.array, part.span or (0, part.array.shape[-2])
    if not into.nbytes or low == high:
        return
    if on_device or not _is_contiguous(array):
        array, low, high = own(array[..., low:high, :]), 0, high - low
    with _view(array) as view, view.cast("B") as source:
        capacity, width = array.shape[-2], view.itemsize * array.shape[-1]
        length = (high - low) * width
        for run in range(into.nbytes // (count * width)):
            at, to = (run * capacity + low) * width, (run * count + first) * width
            into[to : to + length] = source[at : at + length]


def copy_piece(array: mx.array, into: memoryview, at: int, *, on_device: bool) -> int:
    """Copies the next bytes of an array, at most PIECE_BYTES, to `into`. The first `at` bytes must be there already.
    Returns the new number of copied bytes. `on_device` is as for `copy_tokens`."""
    if on_device or not _is_contiguous(array):
        array, stop = _piece(array, at)
        with _view(own(array)) as view, view.cast("B") as source:
            into[at:stop] = source
        return stop
    stop = min(at + PIECE_BYTES, into.nbytes)
    if at < stop:
        with _view(array) as view, view.cast("B") as source:
            into[at:stop] = source[at:stop]
    return stop


def _piece(array: mx.array, at: int) -> tuple[mx.array, int]:
    """Returns the piece of an array from the byte `at` on (0 or the end of the piece before), and the piece's end."""
    stop, within = array.nbytes, array
    start = 0
    while within.ndim and within.nbytes > PIECE_BYTES:
        size = within.nbytes // within.shape[0]  # bytes of one index of the first axis
        index = (at - start) // size
        if size <= PIECE_BYTES:
            count = min(PIECE_BYTES // size, within.shape[0] - index)
            return within[index : index + count], start + (index + count) * size
        within, start = within[index], start + index * size
        stop = start + size
    return within, stop


def array_of(data: memoryview, dtype: str, shape: Sequence[int]) -> mx.array:
    """Returns an array with a copy of these bytes. If Python lacks the type, the array is not evaluated yet."""
    if not data.nbytes:
        return mx.zeros(shape, _DTYPES[dtype])
    form = cast("Literal['B']", ITEM_FORMATS[dtype])  # in truth any format that `memoryview.cast` accepts
    items = data.cast("B").cast(form, list(shape)) if shape else data.cast(form)
    found = mx.array(cast("list[int]", items))
    found = found if shape else found[0]
    return found if found.dtype == _DTYPES[dtype] else found.view(_DTYPES[dtype])


def array_in(buffer: mx.array, at: int, dtype: str, shape: Sequence[int]) -> mx.array:
    """Returns an array, not evaluated yet, over the bytes of `buffer` uint8 [N] from `at` on. The array shares the
    bytes if `at` is aligned for the array's type. Otherwise, the array has a copy."""
    kind = _DTYPES[dtype]
    flat = buffer[at : at + prod(shape) * kind.size]
    if at % kind.size:
        flat = own(flat)
    return flat.view(kind).reshape(shape) if flat.size else mx.zeros(shape, kind)


def restored_snapshot(state: LayerState, start: int, stop: int, arrays: list[mx.array], content: str) -> Snapshot:
    """Returns a layer's snapshot of the tokens [start, stop), made of evaluated arrays. `content` is the JSON of a
    state. Raises SerializeError if the layer cannot hold the arrays."""
    if isinstance(state, CountedState):
        found = _decoded(json.loads(content), arrays)
        if not isinstance(found, wanted := type(state.content(state.offset))):
            raise SerializeError(f"{type(found).__name__} for a {wanted.__name__}")
        return state.restored_snapshot(start, stop, Owned(found, arrays))
    if any(array.ndim < 2 or array.shape[-2] != stop - start for array in arrays) or len(arrays) % 2:
        raise SerializeError(f"{[array.shape for array in arrays]} for {stop - start} tokens")
    return state.restored_snapshot(start, stop, Owned(arrays, arrays))


def _is_contiguous(array: mx.array) -> bool:
    with _view(array) as view:
        return view.c_contiguous


def _view(array: mx.array) -> "memoryview[int]":
    """Evaluates an array, and returns a view of its memory. Release the view before anything writes to the array."""
    return memoryview(cast("bytes", array))


def _encoded(value: object, arrays: list[mx.array]) -> object:
    if isinstance(value, mx.array):
        arrays.append(value)
        return ["a", len(arrays) - 1]
    if type(value) in _PLAIN:
        return ["v", value]
    if type(value) is list:
        return ["l", [_encoded(item, arrays) for item in value]]
    if type(value) is tuple:
        return ["t", [_encoded(item, arrays) for item in value]]
    if type(value) is dict and all(type(name) is str for name in value):
        return ["d", {name: _encoded(item, arrays) for name, item in value.items()}]
    raise SerializeError(type(value).__name__)


def _decoded(tree: object, arrays: Sequence[mx.array]) -> object:
    match tree:
        case ["a", int(index)]:
            return arrays[index]
        case ["v", value]:
            return value
        case ["l", list(items)]:
            return [_decoded(item, arrays) for item in items]
        case ["t", list(items)]:
            return tuple(_decoded(item, arrays) for item in items)
        case ["d", dict(items)]:
            return {name: _decoded(item, arrays) for name, item in items.items()}
    raise SerializeError("no tree")
