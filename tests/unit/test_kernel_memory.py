"""Kernels touch nothing beside their arrays, which end where nothing may be read; vectors of any width do the same."""

import ctypes
import os
import platform
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from runner import cpu
from tests.lib.kernels import Guarded, library
from tests.lib.programs import python
from tests.unit.test_kernels import PACKINGS, made


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p if name == "x" else ctypes.c_size_t) for name in ("x", "ldx", "m", "n", "k")),
        *((name, ctypes.c_int) for name in ("bits", "group", "mode")),
        *((name, ctypes.c_void_p) for name in ("w", "scales", "biases")),
        ("scale_type", ctypes.c_int),
        ("out", ctypes.c_void_p),
        ("out_type", ctypes.c_int),
        ("order", ctypes.c_void_p),
        ("added", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("what", "first", "second")),
        ("constant", ctypes.c_float),
    )


class _Formula(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("steps", _Step * 12))


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "mask", "sinks", "out")),
        *(
            (name, ctypes.c_int)
            for name in ("heads", "kv_heads", "queries", "keys", "d", "dv", "type", "mask_type", "causal", "oldest")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int64 * count) for name, count in (("qs", 3), ("ks", 3), ("vs", 3), ("ms", 4))),
    )


class _Floats(ctypes.Structure):
    _fields_ = (
        ("p", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "token", "head")),
        ("heads_each", ctypes.c_int),
    )


class _Scan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("rule", "channels", "heads", "rows", "columns", "length", "type")),
        ("inputs", _Floats * 6),
        *((name, ctypes.c_void_p) for name in ("tokens", "counts", "before", "after", "y")),
        *((name, ctypes.c_size_t) for name in ("batch_bytes", "token_bytes")),
    )


class _Gates(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("bias", "rates")),
        *((name, ctypes.c_float) for name in ("least", "most", "bound")),
    )


_FUNCTIONS = (
    *("take", "product", "unpack", "weigh", "attend", "rms_norm", "layer_norm", "rope", "apply", "scan", "gates"),
    *("softmax", "mix", "convolve", "to_float", "from_float"),
)
_CODES = {"affine": 0, "mxfp4": 1, "mxfp8": 2, "nvfp4": 3}


class _Kernels(ctypes.Structure):
    _fields_ = (("width", ctypes.c_int), *((name, ctypes.c_void_p) for name in _FUNCTIONS))


class _Convolution(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("taps", "dilation", "silu")),
        ("n", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
    )


def check_bounds(table: _Kernels) -> None:
    """Calls every kernel over arrays that end at a page that nobody may touch: a step beyond ends the process."""
    at, numbers = Guarded(), np.random.default_rng(0)

    def floats(*shape: int) -> int:
        return at(numbers.standard_normal(shape).astype(np.float32))

    def call(name: str, *words: Any) -> None:
        ctypes.CFUNCTYPE(None)(getattr(table, name))(*words)

    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
    for packing, rows, outputs, more in product(PACKINGS, (1, 2, 3, 4, 5, 9), (1, 5, 8), (0, 1)):
        k, affine = 128 + more * packing.group, packing.mode == "affine"
        groups = k // packing.group
        words = at(numbers.integers(0, 256, (outputs, k * packing.bits // 8)).astype(np.uint8))
        scales = floats(outputs, groups) if affine else at(np.full((outputs, groups), 60, np.uint8))
        packed = (packing.bits, packing.group, _CODES[packing.mode], words, scales)
        biases, added = floats(outputs, groups) if affine else None, (floats(rows, outputs), floats(outputs))
        results = biases, 0, floats(rows, outputs), 0, None, *added
        whole = ctypes.byref(_Product(floats(rows, k), k, rows, outputs, k, *packed, *results))
        call("product", whole, size(0), size(outputs), pointer(floats(-(-outputs // table.width) * table.width, k)))
        call("unpack", whole, size(outputs - 1), pointer(floats(k)))
        turned = _Product(floats(rows, outputs), outputs, rows, outputs, k, *packed, *results[:2], floats(rows, k), 0)
        call("weigh", ctypes.byref(turned), pointer(floats(64 * (k + rows))))
        call("take", whole, pointer(floats(k)), 0, pointer(floats(k)))
    for n, bound in product((1, 8, 20), (0, -5)):
        vectors = [floats(-(-n // table.width) * table.width) for _ in range(2)]
        for steps in (None, floats(n)):
            call("gates", ctypes.byref(_Gates(n, *vectors, -1, 1, bound)), *map(pointer, (floats(n), floats(n), steps)))
    for taps, dilation, channels, rows, bias in product((2, 4, 8), (1, 2), (16, 17, 33), (1, 3), (0, 1)):
        read = np.array([floats(channels) for _ in range(rows + (taps - 1) * dilation)], np.uint64)
        weights = floats(channels, taps), floats(channels) if bias else None
        one = ctypes.byref(_Convolution(taps, dilation, bias, channels, *weights))
        call("convolve", one, pointer(at(read)), size(rows), pointer(floats(rows, channels)))
    for kind, item in ((0, np.float32), (1, np.uint16), (2, np.uint16)):

        def row(*shape: int, item: type = item) -> ctypes.c_void_p:
            return pointer(at(np.ones(shape, item)))

        for n in (1, 7, 8, 9, 33, 70):
            call("to_float", row(n), kind, size(n), pointer(floats(n)))
            call("from_float", pointer(floats(n)), size(n), row(n), kind)
            for factor in (None, floats(n)):
                scale = number(1e-5), number(1), pointer(factor)
                call("rms_norm", row(n), kind, size(n), row(n), kind, *scale, row(n), kind)
                every = [_Step(what, what, what if what < 11 else -1, 0.5) for what in range(12)]
                formula = ctypes.byref(_Formula(12, (_Step * 12)(*every)))
                call("apply", formula, pointer(floats(n)), pointer(factor), pointer(floats(n)), size(n))
                parts = pointer(factor), pointer(factor), number(1e-5)
                call("layer_norm", pointer(floats(n)), size(n), *parts, pointer(floats(n)))
            call("softmax", pointer(floats(n)), pointer(floats(n)), size(n))
            for count in (1, 3):
                addend = pointer(floats(n)) if count > 1 else None
                mixed = pointer(floats(count, n)), pointer(floats(count)), size(count), addend
                call("mix", *mixed, pointer(floats(n)), size(n))
        for (rule, channels), (rows, k), tokens in product(SCANS, ((5, 20), (8, 16), (31, 3)), (0, 1, 3)):
            by_heads, columns = rule < 3, 1 if rule == LINEAR else k
            heads, padded = 2 if by_heads else 1, -(-columns // table.width) * table.width
            texts, order = (
                at(np.array([tokens], np.int32)),
                at(np.arange(tokens, dtype=np.int32) if tokens else np.ones(1, np.int32)),
            )
            state = floats(heads, rows, columns), floats(heads, rows, columns)
            shape_of = rule, channels, heads, rows, columns, tokens + 1, kind
            whole_scan = _Scan(
                *shape_of, (_Floats * 6)(), order, texts, *state, row(tokens + 1, heads, rows).value, 0, 0
            )
            whole_scan.token_bytes = heads * rows * np.dtype(item).itemsize
            for i, form in enumerate(SCANS[rule, channels]):
                width = {"c": padded, "r": rows, "h": 1, "a": padded}[form]
                strides = {"a": (padded, 0), "h": (heads, 1)}.get(form, (heads * width, width))
                shape = (rows, padded) if form == "a" else (tokens + 1, heads, width)
                whole_scan.inputs[i] = _Floats(floats(*shape), 0, *strides, 1)
            room = pointer(floats(-(-rows // 4) * 4, padded))
            call("scan", ctypes.byref(whole_scan), 0, heads - 1, 0, rows, room)
        for dims, traditional in product((2, 20, 64), (0, 1)):
            angles = pointer(floats(dims // 2))
            call("rope", row(66), kind, 66, dims, traditional, angles, angles, row(66))
        widths = (64, 64), (20, 12), (80, 96)
        masked = product(widths[1:2], (1, 9), (9, 70), MASKS)
        for (d, dv), queries, keys, mask in (*product(widths, (1, 3, 9), (9, 64, 70), ("all",)), *masked):
            heads, kv = 3, 2
            shown = [pointer(at(each)) for each in MASKS[mask](queries, keys)] or [pointer()]
            inputs = row(kv * heads, queries, d), row(kv, keys, d), row(kv, keys, dv), *shown
            oldest = 0 if shown[0] else keys // 2
            sizes = heads, kv, queries, keys, d, dv, kind, 0 if mask == "added" else 3, 0, oldest
            scores = _Attention(*inputs, row(kv * heads), row(kv * heads, queries, dv), *sizes, 0.1)
            scores.qs[:], scores.ks[:], scores.vs[:] = (0, queries * d, d), (0, keys * d, d), (0, keys * dv, dv)
            scores.ms[:] = (0, 0, keys, 1)
            padded = sum(-(-each // table.width) * table.width for each in (d, dv))
            room = pointer(floats(heads * queries * (padded + 72 + 3) + 72 * padded))
            call("attend", ctypes.byref(scores), 0, kv - 1, 0, queries, room)


LINEAR = 4
SCANS = {
    (0, 0): "ccrhhh",
    (1, 0): "ccrhhh",
    (1, 1): "ccrchh",
    (2, 1): "cccrcc",
    (3, 1): "rraccr",
    (LINEAR, 0): "rrrrrr",
}
"""The rule of a scan, and 1 if its decay has a factor for each column -> the inputs, as kernels get them: of a token
columns of each head, rows of each head, or numbers of each head; or for all tokens columns of each row."""
MASKS: dict[str, Callable[[int, int], list["np.ndarray[Any, Any]"]]] = {
    "none": lambda queries, keys: [],
    "all": lambda queries, keys: [np.ones((queries, keys), np.uint8)],
    "nothing": lambda queries, keys: [np.zeros((queries, keys), np.uint8)],
    "ring": lambda queries, keys: [(np.add.outer(-np.arange(queries), np.arange(keys)) % keys != 5).astype(np.uint8)],
    "window": lambda queries, keys: [(np.tri(queries, keys, 4) * (1 - np.tri(queries, keys, -2))).astype(np.uint8)],
    "added": lambda queries, keys: [np.where(np.tri(queries, keys), 0, -np.inf).astype(np.float32)],
}
"""Masks of queries over keys."""


def table_of(width: int) -> _Kernels:
    choose = library("_kernels").kernels_use
    choose.restype = ctypes.POINTER(_Kernels)
    return cast("_Kernels", choose(width, None, 1, 1)[0])


def test_no_kernel_touches_what_lies_behind_its_arrays() -> None:
    code = "from tests.unit.test_kernel_memory import check_bounds, table_of; check_bounds(table_of(16))"
    done = python("-c", code, timeout=100)
    assert done.returncode == 0, done.stderr


OTHER_WIDTHS = """
import ctypes, sys
from tests.unit.test_kernel_memory import _Kernels, check_bounds, check_products
library = ctypes.CDLL(sys.argv[1])
for width in (4, 16):
    table = _Kernels.in_dll(library, f"kernels_{width}")
    assert table.width == width
    check_bounds(table)
    check_products(table)
"""


def check_products(table: _Kernels) -> None:
    """Compares products and unpacked rows with MLX's own weights."""
    kernel = ctypes.CFUNCTYPE(None)
    for packing, rows in product(PACKINGS, (1, 4, 9)):
        parts, x = packing.of(made(9, 256)), np.array(made(rows, 256, seed=1))
        wanted = np.array(packing.weights(parts))
        words, scales, *biases = (np.array(part) for part in parts)
        taken, found, scratch = np.empty_like(x), np.empty((rows, 9), np.float32), np.empty((9, 256), np.float32)
        places = [each.ctypes.data for each in (words, scales, *biases, *[scales][len(biases) :])]
        packed = (256, rows, 9, 256, packing.bits, packing.group, _CODES[packing.mode], *places, 0)
        whole = ctypes.byref(_Product(taken.ctypes.data, *packed, found.ctypes.data, 0, None, None, None))
        for i in range(rows):
            line = ctypes.c_void_p(x[i].ctypes.data)
            kernel(table.take)(whole, line, 0, ctypes.c_void_p(taken[i].ctypes.data))
        kernel(table.product)(whole, ctypes.c_size_t(0), ctypes.c_size_t(9), ctypes.c_void_p(scratch.ctypes.data))
        assert np.allclose(found, x.astype(np.float64) @ wanted.T, rtol=0, atol=1e-4), (table.width, packing, rows)
        kernel(table.unpack)(whole, ctypes.c_size_t(8), ctypes.c_void_p(scratch.ctypes.data))
        assert np.allclose(scratch[0], wanted[8], rtol=1e-6), (table.width, packing)


@pytest.mark.timeout(300)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the vectors of AVX2 stand in for the others")
def test_kernels_of_other_widths_compute_the_same(tmp_path: Path) -> None:
    """Those for NEON and AVX-512, in the same source, from the instructions that this processor has."""
    folder, target = Path(cpu.__file__).parent, '#pragma GCC target("avx2,fma")\n'
    words = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{folder}", "-Wno-psabi"]
    for width in (4, 16):
        names = f"#define WIDTH {width}\n#define TABLE kernels_{width}\n"
        export = f'struct Kernels; extern "C" const Kernels kernels_{width};\n#include "simd.h"\n'
        (tmp_path / f"{width}.cpp").write_text(target + names + '#include "kernels.h"\n' + export)
    library = tmp_path / "widths.so"
    sources = [str(tmp_path / f"{width}.cpp") for width in (4, 16)]
    subprocess.run([*words, *sources, "-o", str(library)], check=True, timeout=250)
    done = python("-c", OTHER_WIDTHS, str(library), timeout=100)
    assert done.returncode == 0, done.stderr


SANITIZED = """
import sys, pytest
from runner import cpu
cpu.__file__ = sys.argv[1]
words = ["-q", "-p", "no:xdist", f"--basetemp={sys.argv[3]}", "-k", "not other_widths and not sanitizer"]
files = [f"tests/unit/test_{name}.py" for name in ("kernels", "experts", "convolutions", "scans", "kernel_memory")]
status = pytest.main([*words, *files])
assert sys.argv[2] in open("/proc/self/maps").read()
sys.exit(status)
"""


@pytest.mark.slow
def test_the_address_sanitizer_finds_nothing(tmp_path: Path) -> None:
    """All tests of kernels, over kernels that check each of their reads and writes."""
    folder, mlx = Path(cpu.__file__).parent, Path(mx.__file__)
    words = ["-O1", "-g1", "-fPIC", "-fsanitize=address"]
    checked = {"mlx", {4: "neon", 8: "avx2", 16: "avx512"}[library("_kernels").kernels_width(16)]}
    compiler = ["g++", "-std=c++20", "-Wno-psabi", f"-I{mlx.parent}/include", "-c"]
    running = [
        subprocess.Popen([*compiler, *words[: 4 if name in checked else 3], str(folder / f"{name}.cpp")], cwd=tmp_path)
        for name in ("avx2", "avx512", "neon", "mlx")
    ]
    assert [each.wait(1000) for each in running] == [0] * len(running)
    kernels, shim = tmp_path / "_kernels.so", tmp_path / "_shim.so"
    links = ["-Wl,--unresolved-symbols=ignore-in-shared-libs", f"-Wl,--version-script={folder}/exports.map"]
    objects = [str(path) for path in tmp_path.glob("*.o")]
    linked = ["g++", *words, "-shared", *objects, f"-L{mlx.parent}/lib", "-l:libmlx.so", *links, "-o", str(kernels)]
    subprocess.run(linked, check=True)
    subprocess.run(["gcc", *words, "-shared", str(folder / "blas.c"), "-o", str(shim)], check=True)
    # libstdc++ for MLX's exceptions: the sanitizer looks for what throws them when it starts.
    names = ("libasan.so", "libstdc++.so")
    asks = [["gcc", f"-print-file-name={name}"] for name in names]
    found = [subprocess.run(each, capture_output=True, text=True, check=True).stdout.strip() for each in asks]
    around = {**os.environ, "LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0"}
    test = "-c", SANITIZED, str(tmp_path / "__init__.py"), str(kernels), str(tmp_path / "inner")
    done = python(*test, env=around, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
