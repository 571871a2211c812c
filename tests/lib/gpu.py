"""Kernels for GPUs, compiled as C++ and run here: the threads of a block take turns (`gpu.h`)."""

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests import ROOT
from tests.lib.kernels import Guarded

_CPP = {
    mx.float32: "float",
    mx.bfloat16: "bfloat",
    mx.bool_: "bool",
    mx.int32: "int",
    "Shape": "int*",
    "Strides": "int64_t*",
}


class Kernels:
    """Stands in for MLX's makers of kernels, and writes the same functions around sources.

    A call of a kernel collects the source. Once these are compiled, all together as the compiler takes seconds, a call
    computes. Every array ends at a page that nobody may touch.
    """

    def __init__(self, *, metal: bool) -> None:
        self._metal = metal
        self._sources: list[str] = []
        self._library: ctypes.CDLL | None = None

    def compile(self, folder: Path) -> None:
        source, made = folder / "kernels.cpp", folder / "kernels.so"
        functions = (text.replace("NAME", f"kernel_{number}") for number, text in enumerate(self._sources))
        source.write_text("\n".join(['#include "gpu.h"', *functions]))
        words = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared", "-w", f"-I{ROOT}/tests/lib"]
        subprocess.run([*words, str(source), "-o", str(made)], check=True, timeout=250)
        self._library = ctypes.CDLL(str(made))

    def make(
        self, _name: str, names: Sequence[str], outputs: Sequence[str], source: str, *, ensure_row_contiguous: bool
    ) -> Callable[..., list[mx.array]]:
        assert not ensure_row_contiguous
        return partial(self._call, names, outputs, source)

    def _call(
        self,
        names: Sequence[str],
        outputs: Sequence[str],
        source: str,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, int | mx.Dtype]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        at, places, kinds = Guarded(), list[int](), dict[str, str]()
        mx.eval(*inputs)
        for name, array in zip(names, inputs, strict=True):
            numbers = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
            kinds[name] = f"const {_CPP[array.dtype]}*"
            places.append(at(_span(numbers)))
            steps = [step // numbers.itemsize for step in numbers.strides]
            for word, values in (("Shape", np.array(numbers.shape, np.int32)), ("Strides", np.array(steps, np.int64))):
                if (inner := f"{name}_{word.lower()}") in source:
                    kinds[inner] = f"const {_CPP[word]}" if self._metal else word
                    places.append(at(values if self._metal else np.resize(values, 10)))
        made = list(zip(output_shapes, output_dtypes, strict=True))
        ends = [at(np.full(prod(shape) * kind.size, 0xFF, np.uint8)) for shape, kind in made]  # NaN
        kinds |= {name: f"{_CPP[kind]}*" for name, kind in zip(outputs, output_dtypes, strict=True)}
        text = _function(kinds, template, source, whole_groups=not self._metal)
        if self._library is None:
            self._sources += [text] if text not in self._sources else []
            return [mx.zeros(shape, kind) for shape, kind in made]
        function = getattr(self._library, f"kernel_{self._sources.index(text)}")
        pointers = (ctypes.c_void_p * len(kinds))(*places, *ends)
        assert function(pointers, (ctypes.c_int * 3)(*grid), *threadgroup[:2]) == 0, "threads go different ways"
        return [_array(place, shape, kind) for place, (shape, kind) in zip(ends, made, strict=True)]


def _span(numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Returns the bytes from the first number to the last."""
    last = sum((size - 1) * step for size, step in zip(numbers.shape, numbers.strides, strict=True))
    raw = ctypes.string_at(numbers.ctypes.data, last + numbers.itemsize)
    return np.frombuffer(raw, np.uint8)


def _array(place: int, shape: tuple[int, ...], kind: mx.Dtype) -> mx.array:
    raw = np.frombuffer(ctypes.string_at(place, prod(shape) * kind.size), np.uint8)
    return mx.array(raw).view(kind).reshape(shape)


def _function(
    kinds: dict[str, str], template: Sequence[tuple[str, int | mx.Dtype]], source: str, *, whole_groups: bool
) -> str:
    """Returns a function as MLX writes it, and one that runs it over a grid."""
    constants = "".join(
        f"constexpr int {name} = {value};\n" if isinstance(value, int) else f"using {name} = {_CPP[value]};\n"
        for name, value in template
    )
    values = ", ".join(
        f"*({kind}*)p[{index}]" if kind in ("Shape", "Strides") else f"({kind})p[{index}]"
        for index, kind in enumerate(kinds.values())
    )
    return (
        f"static void body_of_NAME({', '.join(f'{kind} {name}' for name, kind in kinds.items())}) {{\n"
        f"{constants}{source}\n}}\n"
        f'extern "C" int NAME(void** p, const int* grid, int across, int down) {{\n'
        f"return run([=] {{ body_of_NAME({values}); }}, grid, across, down, {str(whole_groups).lower()});\n}}"
    )
