"""The scans for GPUs, compiled as C++ and run here: the 32 threads of a warp take turns (tests/lib/warps.h)."""

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest

from runner.model.scans import functions, gpu, kernel
from scripts.tools.device.scans import SMALL, Case, cuts_of, distance, in_parts, one_text
from tests import ROOT
from tests.lib.kernels import Guarded

_Results = tuple[mx.array, mx.array]
_CPP = {mx.float32: "float", mx.bfloat16: "bfloat", mx.bool_: "bool", "Shape": "int*", "Strides": "int64_t*"}


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
        source.write_text("\n".join(['#include "warps.h"', *functions]))
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
        assert threadgroup[0] == grid[0] == 32
        assert function(pointers, (ctypes.c_int * 3)(*grid), threadgroup[1]) == 0, "lanes go different ways"
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
        f'extern "C" int NAME(void** p, const int* grid, int across) {{\n'
        f"return run([=] {{ body_of_NAME({values}); }}, grid, across, {str(whole_groups).lower()});\n}}"
    )


Runs = dict[Case, tuple[_Results, _Results, list[_Results]]]


@pytest.fixture(scope="module", params=["cuda", "metal"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """For each case: the whole, the same in parts, and each text alone."""
    kernels = Kernels(metal=request.param == "metal")
    with pytest.MonkeyPatch.context() as patch:
        _forget()
        patch.setattr(kernel, "on_cpu", lambda: False)
        patch.setattr(gpu, "_MANY_ROWS", 1)
        patch.setattr(mx.metal, "is_available", lambda: request.param == "metal")
        patch.setattr(mx.fast, f"{request.param}_kernel", kernels.make)
        for case in SMALL:
            _run(case)
        kernels.compile(tmp_path_factory.mktemp("kernels"))
        found = {case: _run(case) for case in SMALL}
    _forget()
    return found


def _forget() -> None:
    gpu.prepared.cache_clear()
    gpu._kernel.cache_clear()


def _run(case: Case) -> tuple[_Results, _Results, list[_Results]]:
    parts = in_parts(case, cuts_of(case.tokens))
    return in_parts(case, [0, case.tokens]), parts, [one_text(case, text) for text in range(case.texts)]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_scans_for_gpus_are_exact_whatever_the_cuts_and_rows(runs: Runs, case: Case) -> None:
    whole, parts, alone = runs[case]
    assert distance(case, whole) < 4
    assert all(mx.array_equal(*pair) for pair in zip(whole, parts, strict=True))
    for mine, texts in zip(whole, zip(*alone, strict=True), strict=True):
        assert mx.array_equal(mine, mx.concatenate([*texts]))


@pytest.mark.parametrize(("metal", "width", "theirs"), [(False, 64, False), (True, 64, True), (True, 48, False)])
def test_macs_use_mlx_lms_kernel_where_it_has_one(
    monkeypatch: pytest.MonkeyPatch, *, metal: bool, width: int, theirs: bool
) -> None:
    monkeypatch.setattr(kernel, "on_cpu", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    ours, mlx_lms = (mx.array(0), mx.array(1)), (mx.array(2), mx.array(3))
    monkeypatch.setattr(functions, "scan", lambda *_: ours)
    q, v, gates = mx.zeros((1, 2, 1, width)), mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1))
    inputs = q, q, v, gates, gates, gates[0, 0], gates[0, 0]
    found = functions.gated_delta_update(lambda *_, **__: mlx_lms, *inputs)
    assert found[1] is (mlx_lms if theirs else ours)[1]


def test_each_source_that_mlx_writes_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX keeps one source for a name and a template: sources that take turns are compiled again and again."""
    monkeypatch.setattr(gpu, "_kernel", lambda *_: print)

    def template(heads: int, kind: mx.Dtype, *, metal: bool) -> object:
        monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
        gpu.prepared.cache_clear()
        shapes = (1, 1, 8), (1, 1, 8), (1, heads)
        kernel = gpu.prepared("LINEAR", ("x", "a", "state"), shapes, (kind, kind, mx.float32), mx.float32)
        return [word for word in kernel.keywords["template"] if word[0] != "Dv"]

    assert template(7, mx.float32, metal=True) != template(8, mx.float32, metal=True)
    assert template(7, mx.float32, metal=False) == template(8, mx.float32, metal=False)
    assert template(8, mx.float16, metal=False) != template(8, mx.float32, metal=False)
    gpu.prepared.cache_clear()


def test_mlx_lm_leaves_gated_delta_nets_to_us_on_nvidia() -> None:
    calls = [path.name for path in Path(*mlx_lm.models.__path__).glob("*.py") if "fast.gated_delta" in path.read_text()]
    assert not calls, (
        f"{calls} call MLX's own kernel for gated delta nets: see if `functions.gated_delta_update` still stands in "
        "its place, and what `python -m scripts.tools.device` finds on NVIDIA, where MLX 0.32.4 has a loop"
    )
