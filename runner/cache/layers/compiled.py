"""Decode steps that are recorded once and replayed: `mx.compile` of the forward over one token of each row.

A model's forward runs over stand-ins for its layers, whose buffers, lengths and states are inputs of the graph. Buffers
keep their shape until they grow, so one graph serves a range of contexts. Attention reads whole buffers, and leaves out
what the mask hides. Afterwards the layers hold the graph's outputs, as after any other forward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from runner.cache.layers import flatten
from runner.cache.layers.rows import KVRows

Forward = Callable[[mx.array, list[object]], mx.array]


class Range(NamedTuple):
    """Where layers have their entries: the same for all layers with equal ranges."""

    lengths: tuple[int, ...]
    shifts: tuple[int, ...]
    columns: int
    window: int | None

    def numbers(self) -> list[list[int]]:
        """Returns for each row its length, the column of the next token, the first column it sees, and their number."""
        rows = []
        for length, shift in zip(self.lengths, self.shifts, strict=True):
            seen = min(length + 1, self.window or length + 1)
            rows.append((length, (length + shift) % self.columns, (length + 1 - seen + shift) % self.columns, seen))
        return [*map(list, zip(*rows, strict=True))]


def range_of(layer: object) -> Range | None:
    """Returns the range of a layer with keys and values, or None if the next token would need another buffer."""
    if type(layer) is KVCache:
        columns = layer.keys.shape[2]
        return Range((layer.offset,), (0,), columns, None) if layer.offset < columns else None
    if type(layer) is RotatingKVCache:
        columns, at = layer.keys.shape[2], layer._idx % layer.max_size
        fits = columns == layer.max_size if layer.offset >= columns else at == layer.offset
        return Range((layer.offset,), (at - layer.offset,), columns, layer.max_size) if fits else None
    return None


class _Places:
    def __init__(self, numbers: mx.array, columns: int, masks: dict[int, tuple[mx.array, mx.array, mx.array]]) -> None:
        self.offset, self.place, self.first, self.count = (numbers[i] for i in range(4))
        self.columns = columns
        self.masks = masks
        self._made: dict[int | None, mx.array] = {}

    def mask(self, window: int | None) -> mx.array:
        if window not in self._made:
            first, count = self.first, self.count
            if window is not None:
                count = mx.minimum(self.count, window)
                first = first + (self.count - count)
            seen = (mx.arange(self.columns) - first[:, None]) % self.columns < count[:, None]
            self._made[window] = mask = seen[:, None, None]
            self.masks[id(mask)] = mask, first, count
        return self._made[window]


class _Entries:
    """Stands for a layer with keys and values."""

    scatter = False

    def __init__(self, keys: mx.array, values: mx.array, places: _Places) -> None:
        self.arrays = [keys, values]
        self._places = places
        self.offset = places.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:  # noqa: ARG002, N803
        return self._places.mask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.scatter:
            place = self._places.place[:, None, None, None]
            self.arrays = [
                mx.put_along_axis(x, place, new, 2) for x, new in zip(self.arrays, (keys, values), strict=True)
            ]
        else:
            place = self._places.place
            self.arrays = [
                mx.slice_update(x, new, place, (2,)) for x, new in zip(self.arrays, (keys, values), strict=True)
            ]
        return self.arrays[0], self.arrays[1]


class _States(ArraysCache):
    def __init__(self, arrays: list[mx.array]) -> None:
        super().__init__(len(arrays))
        self.cache = arrays

    @property
    def arrays(self) -> list[mx.array]:
        return self.cache


class CompiledSteps:
    """A forward that replays its graph for one token of each row."""

    def __init__(
        self,
        forward: Forward,
        tracing: Callable[[], AbstractContextManager[object]] = nullcontext,
        compiling: Callable[[], AbstractContextManager[object]] = nullcontext,
        attend: Callable[..., mx.array] | None = None,
    ) -> None:
        self._forward = forward
        self._tracing = tracing
        self._compiling = compiling
        self._attend = attend
        self._steps: dict[object, Callable[..., tuple[mx.array, list[mx.array]]]] = {}
        self.traced = 0

    def __call__(self, tokens: mx.array, layers: list[object]) -> mx.array:
        caches = [*flatten(layers)]
        ranges: dict[Range, int] = {}
        kinds, arrays = list[int](), list[mx.array]()
        if tokens.shape[1] != 1:
            return self._forward(tokens, layers)
        for layer in caches:
            if type(layer) is ArraysCache:
                if any(x is None for x in layer.cache) or layer.lengths is not None or layer.left_padding is not None:
                    return self._forward(tokens, layers)
                kinds.append(-len(layer.cache))
                arrays += layer.cache
            else:
                found = range_of(layer) if getattr(layer, "keys", None) is not None else None
                if found is None:
                    return self._forward(tokens, layers)
                kinds.append(ranges.setdefault(found, len(ranges)))
                arrays += (layer.keys, layer.values)
        key = (*kinds,)
        if key not in self._steps:
            self._steps[key] = mx.compile(partial(self._step, layers=layers, kinds=kinds))
        self.layers = layers
        numbers = mx.array([each.numbers() for each in ranges])
        with self._compiling():
            logits, made = self._steps[key](tokens, numbers, arrays)
        del arrays
        after = iter(made)
        for layer, kind in zip(caches, kinds, strict=True):
            if kind < 0:
                layer.cache = [next(after) for _ in range(-kind)]
            else:
                layer.keys, layer.values = next(after), next(after)
                layer.offset += 1
                if type(layer) is RotatingKVCache:
                    layer._idx = layer._idx % layer.max_size + 1
        return logits

    def _step(
        self, tokens: mx.array, numbers: mx.array, arrays: list[mx.array], layers: list[object], kinds: Sequence[int]
    ) -> tuple[mx.array, list[mx.array]]:
        self.traced += 1
        left, masks = iter(arrays), dict[int, tuple[mx.array, mx.array, mx.array]]()
        places, stands = dict[int, _Places](), dict[int, _Entries | _States]()
        for layer, kind in zip(flatten(self.layers), kinds, strict=True):
            if kind < 0:
                stands[id(layer)] = _States([next(left) for _ in range(-kind)])
                continue
            keys, values = next(left), next(left)
            if kind not in places:
                places[kind] = _Places(numbers[kind], keys.shape[2], masks)
            stands[id(layer)] = _Entries(keys, values, places[kind])

        def rebuilt(layer: object) -> object:
            if type(layer) is CacheList:
                return CacheList(*map(rebuilt, layer.caches))
            return stands.get(id(layer))

        own = mx.fast.scaled_dot_product_attention

        def attend(q: mx.array, k: mx.array, v: mx.array, **rest: Any) -> mx.array:
            found = masks.get(id(rest.get("mask")))
            if self._attend is None or found is None or rest.get("sinks") is not None:
                return own(q, k, v, **rest)
            return self._attend(q, k, v, found[1], found[2], rest["scale"])

        with self._tracing(), patch.object(mx.fast, "scaled_dot_product_attention", attend):
            logits = self._forward(tokens, [*map(rebuilt, self.layers)])
        return logits, [x for each in stands.values() for x in each.arrays]


_SOURCE = """
const int lane = int(threadIdx.x), warp = int(threadIdx.y), head = int(blockIdx.x), text = int(blockIdx.z);
const int heads = int(gridDim.x), group = head / GROUPS, columns = k_shape[2];
const int part = (count[text] + PARTS - 1) / PARTS, begin = int(blockIdx.y) * part;
const int end = begin + part < count[text] ? begin + part : count[text];
__shared__ float tops[WARPS], sums[WARPS], outs[WARPS][DV];
float query[PER], out[PER_V] = {};
#pragma unroll
for (int i = 0; i < PER; ++i) {
  const int at = lane * PER + i;
  query[i] = at < D ? float(q[text * q_strides[0] + head * q_strides[1] + at * q_strides[3]]) * scale[0] : 0.0f;
}
float top = -3.0e38f, sum = 0;
const auto keys = k + text * k_strides[0] + group * k_strides[1];
const auto values = v + text * v_strides[0] + group * v_strides[1];
for (int n = begin + warp; n < end; n += WARPS) {
  const int at = first[text] + n, column = at < columns ? at : at - columns;
  float score = 0;
  #pragma unroll
  for (int i = 0; i < PER; ++i)
    if (lane * PER + i < D) score += query[i] * float(keys[column * k_strides[2] + lane * PER + i]);
  #pragma unroll
  for (int far = 16; far; far /= 2) score += __shfl_xor_sync(0xffffffffu, score, far);
  const float now = score > top ? score : top, keep = expf(top - now), weight = expf(score - now);
  top = now;
  sum = sum * keep + weight;
  #pragma unroll
  for (int i = 0; i < PER_V; ++i)
    if (lane * PER_V + i < DV) out[i] = out[i] * keep + weight * float(values[column * v_strides[2] + lane * PER_V + i]);
}
if (lane == 0) { tops[warp] = top; sums[warp] = sum; }
#pragma unroll
for (int i = 0; i < PER_V; ++i)
  if (lane * PER_V + i < DV) outs[warp][lane * PER_V + i] = out[i];
__syncthreads();
for (int at = warp * 32 + lane; at < DV; at += WARPS * 32) {
  float most = tops[0], total = 0, mixed = 0;
  for (int i = 1; i < WARPS; ++i) most = tops[i] > most ? tops[i] : most;
  for (int i = 0; i < WARPS; ++i) {
    const float share = expf(tops[i] - most);
    total += share * sums[i];
    mixed += share * outs[i][at];
  }
  const int64_t place = (int64_t(text) * heads + head) * PARTS + int(blockIdx.y);
  if (PARTS == 1) y[place * DV + at] = static_cast<Y>(mixed / total);
  else {
    y[place * (DV + 2) + at] = static_cast<Y>(mixed);
    if (at == 0) { y[place * (DV + 2) + DV] = static_cast<Y>(most); y[place * (DV + 2) + DV + 1] = static_cast<Y>(total); }
  }
}
"""
_JOIN = """
const int row = int(blockIdx.x), at = int(threadIdx.x);
float most = -3.0e38f, total = 0, mixed = 0;
for (int i = 0; i < PARTS; ++i) most = fmaxf(most, parts[(row * PARTS + i) * (DV + 2) + DV]);
for (int i = 0; i < PARTS; ++i) {
  const auto part = parts + (row * PARTS + i) * (DV + 2);
  const float share = expf(part[DV] - most);
  total += share * part[DV + 1];
  mixed += share * part[at];
}
y[row * DV + at] = static_cast<Y>(mixed / total);
"""
_WARPS = 16


@cache
def _kernels() -> tuple[Callable[..., list[mx.array]], Callable[..., list[mx.array]]]:
    make: Any = mx.fast.cuda_kernel
    return (
        make("runner_attend", ["q", "k", "v", "first", "count", "scale"], ["y"], _SOURCE, ensure_row_contiguous=False),
        make("runner_join", ["parts"], ["y"], _JOIN),
    )


def attend_on_cuda(q: mx.array, k: mx.array, v: mx.array, first: mx.array, count: mx.array, scale: float) -> mx.array:
    """Returns the attention of one query of each row over `count` columns from `first` on, modulo the columns."""
    batch, heads, _, width = q.shape
    out, columns = v.shape[3], k.shape[2]
    parts = 1 if columns <= 1024 else min(32, columns // 512)
    shapes = {"D": width, "DV": out, "PER": -(-width // 32), "PER_V": -(-out // 32), "WARPS": _WARPS, "PARTS": parts}
    attend, join = _kernels()
    (y,) = attend(
        inputs=[q, k, v, first, count, mx.array([scale], mx.float32)],
        template=[
            *shapes.items(),
            ("T", q.dtype),
            ("GROUPS", heads // k.shape[1]),
            ("Y", q.dtype if parts == 1 else mx.float32),
        ],
        grid=(32 * heads, _WARPS * parts, batch),
        threadgroup=(32, _WARPS, 1),
        output_shapes=[(batch, heads, 1, out) if parts == 1 else (batch, heads, parts, out + 2)],
        output_dtypes=[q.dtype if parts == 1 else mx.float32],
    )
    if parts == 1:
        return y
    return join(
        inputs=[y],
        template=[("DV", out), ("PARTS", parts), ("Y", q.dtype)],
        grid=(batch * heads * out, 1, 1),
        threadgroup=(out, 1, 1),
        output_shapes=[(batch, heads, 1, out)],
        output_dtypes=[q.dtype],
    )[0]
