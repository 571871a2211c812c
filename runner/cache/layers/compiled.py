"""Compiled decode steps: the graph of a forward over one token of each row is kept, and used again for later tokens.

A step is compiled by `mx.compile`, from a forward over stand-ins for the layers. Its inputs are the buffers, the
states, and the columns of the entries. So one graph serves all contexts that fit into the buffers: attention reads
whole buffers, and a mask hides what a token must not see. Afterwards the layers are as after the forward, to the last
bit. As for several rows in one forward, a model must take offsets that are arrays, and its attention must obey a mask.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from runner import cpu
from runner.cache.layers import flatten
from runner.cache.layers.attention import attend_columns
from runner.cache.layers.rows import KVRows, Layout
from runner.device import on_cuda
from runner.logs import Log, exception_line

log = Log(__name__)
Forward: TypeAlias = Callable[[mx.array, list[object]], mx.array]
_Step: TypeAlias = Callable[[mx.array, mx.array, Sequence[mx.array]], tuple[mx.array, list[mx.array]]]
_PLAIN_STEPS = 4  # over the same buffers, before a step is compiled, which takes longer than a plain one
_MOST_GRAPHS = 16
_TURNS, _TURN_STEPS = 4, 8


def _layout(layer: object) -> Layout | None:
    """Returns the layout of a layer's entries. Returns None if the layer's class is unknown, if the layer is empty, or
    if the next token needs other buffers."""
    if type(layer) is KVRows:
        return layer.layout() if layer.keys is not None else None
    if not isinstance(layer, KVCache | RotatingKVCache) or layer.keys is None:
        return None
    length, columns = layer.offset, layer.keys.shape[2]
    if type(layer) is KVCache:
        return Layout((length,), (0,), columns, None) if length < columns else None
    if type(layer) is not RotatingKVCache or layer.keep:
        return None
    column = layer._idx % layer.max_size
    fits = columns == layer.max_size or column == length < columns < layer.max_size
    return Layout((length,), (column - length,), columns, layer.max_size) if fits else None


class _Mask(NamedTuple):
    mask: mx.array
    first: mx.array
    """The first column that the next token of each row sees, int [B]."""
    seen: mx.array
    """The number of columns that this token sees, int [B]."""


class _Columns:
    """The layout of a layer while a step is compiled."""

    def __init__(self, numbers: mx.array, count: int, *, full: bool) -> None:
        self.offset, self.next, self._first, self._seen = (numbers[index] for index in range(4))
        self._all = mx.arange(count)
        self._full = full
        self._masks: dict[int | None, _Mask] = {}

    def mask(self, window: int | None) -> mx.array | None:
        """Returns a mask of the columns that tokens may look at, bool [B, 1, 1, columns]; None if these are all."""
        if self._full and (window is None or window >= self._all.size):
            return None  # then the kernel begins with the oldest entry, as in a plain step
        if window not in self._masks:
            seen = self._seen if window is None else mx.minimum(self._seen, window)
            first = self._first + self._seen - seen
            mask = (self._all - first[:, None]) % self._all.size < seen[:, None]
            self._masks[window] = _Mask(mask[:, None, None], first, seen)
        return self._masks[window].mask

    def of_mask(self, mask: object) -> "_Mask | None":
        """Returns a mask of this object with its columns; None for any other mask."""
        return next((each for each in self._masks.values() if each.mask is mask), None)


class _Entries:
    """Stands for a layer with keys and values while a step is compiled."""

    def __init__(self, arrays: list[mx.array], columns: _Columns) -> None:
        self.arrays = arrays
        self._columns = columns
        self.offset = columns.offset

    def make_mask(
        self,
        N: int,  # noqa: ARG002, N803  the name is mlx-lm's
        return_array: bool = False,  # noqa: ARG002
        window_size: int | None = None,
    ) -> mx.array | None:
        """Returns the mask for the next token of each row."""
        return self._columns.mask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Appends an entry to each row. Returns the keys and values in the columns of the mask."""
        self.arrays = [self._written(*pair) for pair in zip(self.arrays, (keys, values), strict=True)]
        rows = len(keys)
        return [x if len(x) == rows else x[:rows] for x in self.arrays]

    def _written(self, buffer: mx.array, entries: mx.array) -> mx.array:
        column = self._columns.next
        if free := len(buffer) - len(entries):  # rows without an answer get zeros, which nothing reads
            column, entries = mx.pad(column, (0, free)), mx.pad(entries, [(0, free), (0, 0), (0, 0), (0, 0)])
        return mx.put_along_axis(buffer, column[:, None, None, None], entries.astype(buffer.dtype), axis=2)


class _Kind(NamedTuple):
    """A layer as a compiled step sees it: the number of its arrays; the index of its layout, None if it has states; the
    number of columns; and `full`, True if the next token sees all of them."""

    arrays: int
    layout: int | None = None
    columns: int = 0
    full: bool = False


class _Inputs(NamedTuple):
    """The inputs of a step over some layers."""

    caches: Sequence[object]
    kinds: tuple[_Kind, ...]
    numbers: list[list[list[int]]]
    arrays: list[mx.array]

    @classmethod
    def of(cls, layers: list[object]) -> "_Inputs | None":
        """Returns the inputs; None if a step over these layers cannot be compiled, or not now."""
        caches: list[Any] = [*flatten(layers)]
        kinds, arrays, layouts = list[_Kind](), list[mx.array](), dict[Layout, int]()
        for layer in caches:
            own = type(layer)  # compared directly, it would narrow `layer` to a type whose fields mypy gets wrong
            if own is ArraysCache:
                if layer.lengths is not None or layer.left_padding is not None or any(x is None for x in layer.cache):
                    return None
                arrays += layer.cache
                kinds.append(_Kind(len(layer.cache)))
            elif (layout := _layout(layer)) is not None:
                arrays += (layer.keys, layer.values)
                kinds.append(_Kind(2, layouts.setdefault(layout, len(layouts)), layout.columns, layout.full))
            else:
                return None
        return cls(caches, (*kinds,), [each.numbers() for each in layouts], arrays)

    def put(self, arrays: Sequence[mx.array]) -> None:
        """Puts the arrays after the step into the layers."""
        left = iter(arrays)
        for layer in cast("Sequence[Any]", self.caches):
            own = type(layer)  # as above
            if own is ArraysCache:
                layer.cache[:] = [next(left) for _ in layer.cache]
                continue
            layer.keys, layer.values = next(left), next(left)
            if type(layer) is KVRows:
                layer.stand([length + 1 for length in layer.lengths])
                continue
            layer.offset += 1
            if type(layer) is RotatingKVCache:
                layer._idx = layer._idx % layer.max_size + 1


def _stand_in(
    kinds: Sequence[_Kind], numbers: mx.array, arrays: Sequence[mx.array]
) -> tuple[list[Any], Sequence[_Columns]]:
    """Returns stand-ins for layers of these kinds, with these arrays in them, and the columns of each layout."""
    left, columns, stands = iter(arrays), dict[int, _Columns](), list[Any]()
    for kind in kinds:
        own = [next(left) for _ in range(kind.arrays)]
        if kind.layout is None:
            stands.append(ArraysCache(kind.arrays))
            stands[-1].cache = own
            continue
        if kind.layout not in columns:
            columns[kind.layout] = _Columns(numbers[kind.layout], kind.columns, full=kind.full)
        stands.append(_Entries(own, columns[kind.layout]))
    return stands, [*columns.values()]


def _attend(
    own: Callable[..., mx.array], columns: Sequence[_Columns], q: mx.array, k: mx.array, v: mx.array, **rest: Any
) -> mx.array:
    """Computes attention by MLX's `own` function, or on NVIDIA GPUs by the kernel."""
    found = next((mask for each in columns if (mask := each.of_mask(rest.get("mask")))), None)
    if found is None or not on_cuda():
        return own(q, k, v, **rest)
    return attend_columns(q, k, v, found.first, found.seen, rest["scale"], rest.get("sinks"))


class CompiledSteps:
    """A forward that compiles its steps over one token of each row. It computes all other forwards plainly, and so the
    steps that cannot be compiled. Owner: the engine thread."""

    def __init__(self, forward: Forward, built: Forward, most_columns: float = inf) -> None:
        """`built` is the same as `forward`, but evaluates nothing. Steps over buffers of more than `most_columns` are
        not compiled."""
        self._forward = forward
        self._built = built
        self._most_columns = most_columns
        self._steps: dict[object, int | _Step] = {}
        """Rows and kinds of layers -> the compiled step, or the number of plain steps so far. The latest is last."""
        self.ran = 0
        """The number of steps that ran compiled."""
        self.on = True
        """False once a step could not be compiled, or plain steps were faster in the trial."""

    def __call__(self, tokens: mx.array, layers: list[object]) -> mx.array:
        """Returns the lazy logits [B, L, V] of the tokens [B, L]."""
        inputs = _Inputs.of(layers) if self.on and tokens.shape[1] == 1 else None
        if inputs is None:
            return self._forward(tokens, layers)
        key = (tokens.shape[0], inputs.kinds)
        step = self._steps.pop(key, 0)
        if isinstance(step, int):
            is_plain = step < _PLAIN_STEPS or any(kind.columns > self._most_columns for kind in inputs.kinds)
            step = step + 1 if is_plain else self._compiled(inputs.kinds, _order_of(layers, inputs.caches))
        self._steps[key] = step
        if len(self._steps) > _MOST_GRAPHS:
            del self._steps[next(iter(self._steps))]
        if isinstance(step, int):
            return self._forward(tokens, layers)
        try:
            with cpu.compiling():
                logits, arrays = step(tokens, mx.array(inputs.numbers), inputs.arrays)
        except Exception as error:  # classes of many authors raise errors of any type
            log.debug("decode steps are not compiled", why=exception_line(error))
            self.on = False
            return self._forward(tokens, layers)
        inputs.put(arrays)
        self.ran += 1
        return logits

    def try_out(self, make_layers: Callable[[], list[object]], prompt: list[int]) -> None:
        """Turns compiled steps off unless they take less time than plain ones. Both take turns after this prompt."""
        ways: list[tuple[Forward, list[object], list[float]]]
        ways = [(each, make_layers(), []) for each in (self._forward, self)]
        try:
            for _, layers, _ in ways:
                mx.eval(self._forward(mx.array([prompt]), layers))
            for forward, layers, seconds in ways * _TURNS:
                token, began_s = mx.array(prompt[:1]), perf_counter()
                for _ in range(_TURN_STEPS):
                    token = mx.argmax(forward(token[:, None], layers)[:, -1], axis=-1)
                    mx.async_eval(token)
                mx.eval(token)
                seconds.append(perf_counter() - began_s)
            plain, compiled = (min(seconds) for _, _, seconds in ways)
            self.on = self.on and self.ran > 0 and compiled < plain
        except Exception as error:
            log.warning("decode steps are not compiled", why=exception_line(error))
            self.on = False

    def _compiled(self, kinds: Sequence[_Kind], order: "_Order") -> _Step:
        """Returns a step over such layers, which is compiled when it is first called. It holds no layer and no array of
        a layer: otherwise MLX would copy the buffers in every step."""

        def step(tokens: mx.array, numbers: mx.array, arrays: Sequence[mx.array]) -> tuple[mx.array, list[mx.array]]:
            stands, columns = _stand_in(kinds, numbers, arrays)
            own = mx.fast.scaled_dot_product_attention
            mx.fast.scaled_dot_product_attention = partial(_attend, own, columns)
            try:
                logits = self._built(tokens, _nested(order, stands))
            finally:
                mx.fast.scaled_dot_product_attention = own
            return logits, [x for each in stands for x in (each.arrays if type(each) is _Entries else each.cache)]

        return cast("_Step", mx.compile(step))


_Order: TypeAlias = "Sequence[int | _Order | None]"
"""The order of a model's layers: the index of each in `flatten`, and a list for each CacheList."""


def _order_of(layers: Sequence[object], caches: Sequence[object]) -> _Order:
    places = {id(each): index for index, each in enumerate(caches)}
    return [_order_of(each.caches, caches) if type(each) is CacheList else places.get(id(each)) for each in layers]


def _nested(order: _Order, stands: Sequence[object]) -> list[object]:
    return [
        None if each is None else stands[each] if isinstance(each, int) else CacheList(*_nested(each, stands))
        for each in order
    ]
