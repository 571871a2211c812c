"""The kernel of recurrences for NVIDIA and Apple GPUs: its source for each rule, and the threads that run it.

A state has Hv x Dv rows of Dk columns. `LANES` threads of a warp share a row: each holds `PER` columns of it in
registers over all tokens. So states are read and written once, and only sums over a row go from thread to thread. A sum
is added in an order that depends on `Dk` alone: first within a thread, then between neighbours at distance 1, 2, 4. So
a prompt may be cut anywhere, and no row depends on the others: the bits are the same. Each product that is added goes
through `FMA`, so that no compiler chooses.

The inputs of the next token are read while the present one is computed: no read depends on the state. They are
converted only when their turn comes, since a conversion would wait for them. If there are many rows, a thread has
`ROWS` of them, for which it reads the inputs along columns once.

MLX's own `mx.fast.gated_delta_update` has kernels for Macs alone (0.32.4). On NVIDIA it is a loop over tokens, too.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

_WARP, _WARPS = 32, 4
_COLUMNS = 8
"""The most columns of a thread, unless a row has more than a warp's threads can share."""
_ROWS, _MANY_ROWS = 4, 2048
"""The rows of a thread if a head has a multiple of them, and all heads together have many rows. With fewer, a GPU would
have too few threads."""
_CONSTANT = 8
"""The size from which an array is in Metal's `device` memory. There MLX keeps one source for each name and template,
and compiles anew if the source differs. So all that MLX writes into the source by itself is in the template, too."""
_DEVICES = {
    False: (
        "#define LANE int(threadIdx.x)",
        "#define GROUP int(blockIdx.y * blockDim.y + threadIdx.y)",
        "#define TEXT int(blockIdx.z)",
        "#define AT_DISTANCE(x, far) __shfl_xor_sync(0xffffffffu, x, far)",
        "#define FMA fmaf",
        "#define EXP expf",
        '#define UNROLLED _Pragma("unroll")',
    ),
    True: (
        "#define LANE int(thread_index_in_simdgroup)",
        "#define GROUP int(thread_position_in_grid.y)",
        "#define TEXT int(thread_position_in_grid.z)",
        "#define AT_DISTANCE(x, far) simd_shuffle_xor(x, ushort(far))",
        "#define FMA metal::fma",
        "#define EXP metal::exp",
        '#define UNROLLED _Pragma("clang loop unroll(full)")',
    ),
}
"""The words of CUDA, and for True those of Metal: all that differs."""
_AXES = {"b": "TEXT", "h": "head", "k": "head / (Hv / Hk)", "r": "row"}
"""The place of a thread on each axis: texts, heads of values and of keys, rows. `t` counts tokens, and `c` columns."""


class _Update(NamedTuple):
    """A rule: the axes of its inputs, those of its state, and the update for one token, which adds to `out`."""

    inputs: Mapping[str, str]
    state: str
    text: str


_UPDATES = {
    "DECAY": _Update(
        {"q": "btkc", "k": "btkc", "v": "bthr", "g": "bth", "beta": "bth", "skip": "h"},
        "bhrc",
        """ROW {
  const float change = beta * v[j];
  EACH { state[j][i] = FMA(k[i], change, state[j][i] * GATE); out[j] = FMA(state[j][i], q[i], out[j]); }
}
TOTAL(out)
ROW out[j] = FMA(skip, v[j], out[j]);""",
    ),
    "DELTA": _Update(
        {"q": "btkc", "k": "btkc", "v": "bthr", "g": "bth", "beta": "bth"},
        "bhrc",
        """float seen[ROWS] = {};
ROW EACH { state[j][i] *= GATE; seen[j] = FMA(state[j][i], k[i], seen[j]); }
TOTAL(seen)
ROW {
  const float change = (v[j] - seen[j]) * beta;
  EACH { state[j][i] = FMA(k[i], change, state[j][i]); out[j] = FMA(state[j][i], q[i], out[j]); }
}
TOTAL(out)""",
    ),
    "WKV": _Update(
        {"r": "bthc", "w": "bthc", "k": "bthc", "v": "bthr", "a": "bthc", "b": "bthc"},
        "bhrc",
        """float seen[ROWS] = {};
ROW EACH seen[j] = FMA(state[j][i], a[i], seen[j]);
TOTAL(seen)
ROW EACH {
  state[j][i] = FMA(b[i], seen[j], FMA(k[i], v[j], state[j][i] * w[i]));
  out[j] = FMA(state[j][i], r[i], out[j]);
}
TOTAL(out)""",
    ),
    "SELECTIVE": _Update(
        {"x": "btr", "dt": "btr", "A": "rc", "B": "btc", "C": "btc", "D": "r"},
        "brc",
        """ROW {
  const float change = dt[j] * x[j];
  EACH {
    state[j][i] = FMA(B[i], change, state[j][i] * EXP(dt[j] * A[j][i]));
    out[j] = FMA(state[j][i], C[i], out[j]);
  }
}
TOTAL(out)
ROW out[j] = FMA(D[j], x[j], out[j]);""",
    ),
    "LINEAR": _Update({"x": "btr", "a": "btr"}, "br", "ROW out[j] = state[j] = FMA(a[j], state[j], x[j]);"),
}


Shapes = tuple[tuple[int, ...], ...]
Kernel = Callable[..., Sequence[mx.array]]


@lru_cache(maxsize=256)
def prepared(
    rule: str, names: tuple[str, ...], shapes: Shapes, kinds: tuple[mx.Dtype, ...], dtype: mx.Dtype
) -> "partial[Sequence[mx.array]]":
    """Returns the kernel for the rule of this name, over arrays of any strides: the inputs, the state, and the mask if
    there is one. `dtype` is that of the outputs."""
    axes = axes_of(rule, {name: len(shape) for name, shape in zip(names, shapes, strict=True)})
    sizes = {
        axis: size
        for name, shape in zip(names, shapes, strict=True)
        for axis, size in zip(axes[name], shape, strict=True)
    }
    heads, rows, width = (sizes.get(axis, 1) for axis in "hrc")
    lanes = min(_WARP, 1 << (-(-width // _COLUMNS) - 1).bit_length())
    each = _ROWS if "h" in axes["state"] and rows % _ROWS == 0 and heads * rows >= _MANY_ROWS else 1
    counts = {"Hv": heads, "Hk": sizes.get("k", heads), "Dv": rows, "Dk": width, "LANES": lanes, "ROWS": each}
    types = [(f"T_{name}", kind) for name, kind in zip(names, kinds, strict=True)]
    small = sum(mx.metal.is_available() << at for at, shape in enumerate(shapes) if prod(shape) < _CONSTANT)
    return partial(
        _kernel(rule, names, tuple(map(len, shapes))),
        template=[*counts.items(), ("PER", -(-width // lanes)), ("Y", dtype), *types, ("SMALL", small)],
        grid=(_WARP, -(-heads * rows // each * lanes // _WARP), sizes["b"]),
        threadgroup=(_WARP, _WARPS, 1),
    )


@cache
def _kernel(rule: str, names: tuple[str, ...], dimensions: tuple[int, ...]) -> Kernel:
    metal = mx.metal.is_available()
    make: Callable[..., Any] = mx.fast.metal_kernel if metal else mx.fast.cuda_kernel
    body = source(rule, dict(zip(names, dimensions, strict=True)), metal=metal)
    name = "_".join(["runner_scan", rule.lower(), *map(str, dimensions)])
    made: Kernel = make(name, names, ["y", "after"], body, ensure_row_contiguous=False)
    return made


def axes_of(rule: str, dimensions: Mapping[str, int]) -> Mapping[str, str]:
    """Returns the axes of each array of a rule, which are as many as its dimensions."""
    update = _UPDATES[rule]
    axes = {**update.inputs, "state": update.state, "mask": "bt"}
    return {name: axes[name] + "c" * (count - len(axes[name])) for name, count in dimensions.items()}


def source(rule: str, dimensions: Mapping[str, int], *, metal: bool) -> str:
    """Returns the body of the kernel for arrays with these numbers of dimensions. It sees their numbers by name."""
    axes, update = axes_of(rule, dimensions), _UPDATES[rule].text
    fixed, moving = ([name for name in axes if ("t" in axes[name]) == moves] for moves in (False, True))
    read_ahead = [_set(f"next_{name}", axes[name], _read(name, axes[name])) for name in moving]
    lines = [
        *_DEVICES[metal],
        "#define COLUMN (lane + i * LANES)",
        "#define EACH UNROLLED for (int i = 0; i < PER; ++i)",
        "#define ROW UNROLLED for (int j = 0; j < ROWS; ++j)",
        "#define TOTAL(x) UNROLLED for (int far = 1; far < LANES; far *= 2) ROW x[j] += AT_DISTANCE(x[j], far);",
        f"#define GATE {'g[i]' if 'c' in axes.get('g', '') else 'g'}",
        f"const int lane = LANE % LANES, place = (GROUP * ({_WARP} / LANES) + LANE / LANES) * ROWS;",
        "const bool live = place < Hv * Dv;",
        "const int head = live ? place / Dv : 0, row = live ? place % Dv : 0;",
        f"const int tokens = {moving[0]}_shape[1];",
        *(f"const auto {name}_at = {name}{_offset(name, axes[name])};" for name in axes),
        "{",
        *(f"float {name}{_sizes(axes[name])};" for name in axes),
        *(_set(name, axes[name], f"float({_read(name, axes[name])})") for name in fixed),
        *(f"T_{name} next_{name}{_sizes(axes[name])};" for name in moving),
        "int ahead = 0;",
        *read_ahead,
        "for (int t = 0; t < tokens; ++t) {",
        *(_set(name, axes[name], f"float(next_{name}{_index(axes[name])})") for name in moving),
        "if (t + 1 < tokens) ahead = t + 1;",
        *read_ahead,
        "float out[ROWS] = {};",
        f"if ({'mask != 0' if 'mask' in axes else 'true'}) {{",
        update,
        "}",
        "if (live && lane == 0)",
        "ROW y[(int64_t(TEXT) * tokens + t) * (Hv * Dv) + place + j] = static_cast<Y>(out[j]);",
        "}",
        "if (live)",
        "ROW EACH if (COLUMN < Dk) after[(int64_t(TEXT) * (Hv * Dv) + place + j) * Dk + COLUMN] = "
        f"state{_index(axes['state'])};",
        "}",
    ]
    return "\n".join(lines)


def _sizes(axes: str) -> str:
    """Returns the sizes in the declaration of a thread's numbers of an array, for one token."""
    return "[ROWS]" * ("r" in axes) + "[PER]" * ("c" in axes)


def _index(axes: str) -> str:
    return "[j]" * ("r" in axes) + "[i]" * ("c" in axes)


def _set(name: str, axes: str, number: str) -> str:
    """Returns the statement that sets a thread's numbers of an array."""
    return f"{'ROW ' * ('r' in axes)}{'EACH' * ('c' in axes)} {name}{_index(axes)} = {number};"


def _offset(name: str, axes: str) -> str:
    """Returns the offset of the first number of an array that a thread reads."""
    return "".join(f" + {_AXES[axis]} * {name}_strides[{index}]" for index, axis in enumerate(axes) if axis in _AXES)


def _read(name: str, axes: str) -> str:
    """Returns the expression that reads a number of the token `ahead`, or one for all tokens; 0 beyond the columns."""
    factors = {"t": "ahead", "r": "j", "c": "COLUMN"}
    place = " + ".join(f"{factors[axis]} * {name}_strides[{at}]" for at, axis in enumerate(axes) if axis in factors)
    number = f"{name}_at[{place or '0'}]"
    return f"COLUMN < Dk ? {number} : T_{name}(0.0f)" if "c" in axes else number
