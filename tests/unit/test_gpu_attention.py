"""The attention of compiled steps on NVIDIA GPUs, compiled as C++ and run here (tests/lib/blocks.h), beside MLX's."""

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from runner.cache.layers import attention
from tests import ROOT


def run(
    folder: Path,
    names: Sequence[str],
    source: str,
    inputs: Sequence[mx.array],
    template: Sequence[tuple[str, int | mx.Dtype]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    """Computes a kernel as MLX would, for arrays of float32 and int32."""
    numbers = [np.asarray(each) for each in inputs]
    made = np.full(output_shapes[0], np.nan, np.float32)
    text = '#include "blocks.h"\n'
    for name, value in template:
        text += f"constexpr int {name} = {value};\n" if isinstance(value, int) else f"using {name} = float;\n"
    for name, each in zip(names, numbers, strict=True):
        text += f"const {'int' if each.dtype == np.int32 else 'float'}* {name};\n"
        steps = [step // each.itemsize for step in each.strides]
        for word, values in (("shape", each.shape), ("strides", steps)):
            text += f"const int {name}_{word}[] = {{{', '.join(map(str, values))}}};\n"
    places = "".join(f"{name} = (decltype({name}))p[{index}];\n" for index, name in enumerate(names))
    sizes = ", ".join(str(-(-whole // part)) for whole, part in zip(grid, threadgroup, strict=True))
    text += f'float* y;\nvoid body() {{\n{source}\n}}\nextern "C" void go(void** p) {{\n{places}'
    text += f"y = (float*)p[{len(names)}];\n"
    text += f"run({{{sizes}}}, {threadgroup[0]}, {threadgroup[1]}, body);\n}}"
    library = folder / f"{abs(hash(text))}.so"
    words = ["g++", "-std=c++20", "-w", "-pthread", "-shared", "-fPIC", f"-I{ROOT}/tests/lib", "-x", "c++", "-"]
    subprocess.run([*words, "-o", str(library)], input=text, text=True, check=True, timeout=100)
    ctypes.CDLL(str(library)).go((ctypes.c_void_p * (len(names) + 1))(*(x.ctypes.data for x in (*numbers, made))))
    return [mx.array(made)]


@pytest.mark.full
def test_the_kernels_attend_as_mlx_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(_name: str, names: Sequence[str], _outputs: object, source: str, **_rest: bool) -> Callable[..., object]:
        return partial(run, tmp_path, names, source)

    monkeypatch.setattr(mx.fast, "cuda_kernel", make)
    monkeypatch.setattr(attention, "_WARPS", 3)
    monkeypatch.setattr(attention, "_ALONE", 40)
    monkeypatch.setattr(attention, "_SHARE", 20)
    attention._kernels.cache_clear()
    for columns, heads, groups, width, out in ((40, 2, 2, 40, 72), (70, 4, 2, 64, 32)):
        mx.random.seed(columns)
        shapes = ((2, heads, 1, width), (3, groups, columns, width), (3, groups, columns, out))
        q, k, v = map(mx.random.normal, shapes)
        first, seen = mx.array([columns - 7, 3]), mx.array([columns - 20, 2])
        mask = (mx.arange(columns) - first[:, None]) % columns < seen[:, None]
        right = mx.fast.scaled_dot_product_attention(q, k[:2], v[:2], scale=0.3, mask=mask[:, None, None])
        found = attention.attend_columns(q, k[:2], v[:2], first, seen, 0.3)
        assert mx.abs(found - right).max() < 1e-5
    attention._kernels.cache_clear()
