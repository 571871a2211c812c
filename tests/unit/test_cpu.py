"""A fast BLAS replaces MLX's own, with the same results up to rounding; so do kernels, unless there is a reason."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from runner import cpu
from runner.versions import install_command
from tests.lib.programs import python

PRODUCTS = """
from runner import cpu
print(cpu.preload().blas)
import mlx.core as mx
key = mx.random.key(0)
w = mx.random.normal((96, 64), key=key)
worst = 0.0
for rows in (1, 2, 4, 5, 33):
    x = mx.random.normal((rows, 64), key=key)
    want = (x[:, None, :] * w[None]).sum(-1)
    for got in (x @ w.T, x @ mx.contiguous(w.T)):
        worst = max(worst, mx.abs(got - want).max().item())
print(worst)
"""

CALLS = """
import ctypes
from pathlib import Path
from runner import cpu
cpu.preload()
import mlx.core as mx
shim = ctypes.CDLL(str(cpu._shim()))
x = mx.ones((8, 8))
for product in (x @ x, x[:1] @ x.T):
    before = shim.shim_calls()
    mx.eval(product)
    print(shim.shim_calls() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU wheel needs one")
def test_mlx_calls_the_shim_for_its_products() -> None:
    assert python("-c", CALLS, check=True).stdout.split() == ["1", "1"]


FAULTS = """
import resource
from threading import Thread
from runner import cpu
cpu.preload()
import mlx.core as mx
def rounds():
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        mx.eval([mx.arange(1 << 20, stream=mx.cpu) for _ in range(24)])
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
engine = Thread(target=rounds)
engine.start()
engine.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU wheel needs one")
def test_a_forward_takes_the_memory_that_another_one_freed() -> None:
    first, second = map(int, python("-c", FAULTS, check=True).stdout.split())
    assert first > 20_000 > 5 * second  # pages of 24 arrays of 4 MB; 16,000 by default


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU wheel needs one")
def test_the_set_up_built_the_shim_and_auto_uses_it() -> None:
    name, worst = python("-c", PRODUCTS, check=True).stdout.splitlines()
    assert name == f"numpy's OpenBLAS ({cpu.Threads.of(None)})"
    assert float(worst) < 1e-4


@pytest.mark.parametrize("library", ["/nonexistent/libblas.so", "libm.so.6"])
def test_a_library_that_is_no_blas_is_refused_by_name(library: str) -> None:
    done = python("-c", f"from runner import cpu; cpu.preload({library!r})")
    assert f"UsageError: --blas {library}: " in done.stderr


KERNEL = """
import ctypes, os, random, sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import product as each_of
import numpy as np
from pathlib import Path
from runner import cpu
from tests.lib.kernels import Guarded
_, path, *threads = sys.argv
cpu._shim = lambda: Path(path)
assert cpu._load_shim(cpu.Threads(*map(int, threads)))
product = ctypes.CDLL(path).cblas_sgemm
whole, number, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
product.argtypes = [*[whole] * 6, number, address, whole, address, whole, number, address, whole]
product.restype = None
numbers, choose = np.random.default_rng(0), random.Random(0).choice
NONE, TRANSPOSED, GUARD = 111, 112, 7.0
LENGTHS = *[0] * 4, *range(1, 40), 127


def padded(array, extra, fill=np.nan):
    "With `extra` columns that must not be used, which the last row lacks."
    room = np.full((max(1, array.shape[0]), max(1, array.shape[1] + extra)), fill, np.float32)
    room[: array.shape[0], : array.shape[1]] = array
    return room.reshape(-1)[: room.size - extra], room.shape[1]


def multiply(a, b, c, alpha, beta, trans_a=NONE, trans_b=TRANSPOSED, extra=0):
    m, n = c.shape
    k = a.shape[1] if trans_a == NONE else a.shape[0]
    at = Guarded()
    left, right, out = padded(a, extra), padded(b, extra), padded(c, extra, GUARD)
    place = at(out[0])
    rest = at(left[0]), left[1], at(right[0]), right[1], beta, place, out[1]
    product(101, trans_a, trans_b, m, n, k, alpha, *rest)
    found = np.frombuffer((number * len(out[0])).from_address(place), np.float32)
    found = np.append(found, [GUARD] * extra).reshape(-1, out[1]).astype(np.float32)
    assert (found[m:] == GUARD).all() and (found[:, n:] == GUARD).all(), "it wrote beside its place"
    return found[:m, :n]


for _ in range(200):
    m, n, k = (choose(sizes) for sizes in ((0, *range(1, 11), 17, 40), (0, 1, 2, 3, 4, 7, 8, 9, 31, 100), LENGTHS))
    forms = choose((NONE, TRANSPOSED)), choose((NONE, TRANSPOSED))
    alpha, beta = choose((1.0, 1.0, 0.5, 0.0, -2.0)), choose((0.0, 0.0, 1.0, 0.25))
    a, b = (numbers.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    c = numbers.standard_normal((m, n)).astype(np.float32) if beta else np.full((m, n), np.nan, np.float32)
    want = alpha * (a.astype(np.float64) @ b.astype(np.float64)) + (beta * c if beta else 0)
    stored = [array.T.copy() if form == TRANSPOSED else array for array, form in zip((a, b), forms)]
    got = multiply(*stored, c, alpha, beta, *forms, extra=choose((0, 3)))
    assert np.allclose(got, want, atol=2e-5 * (1 + k) ** 0.5), (m, n, k, forms, alpha, beta)

same = True
for k, form, turned in each_of((45, 1601), (NONE, TRANSPOSED), (NONE, TRANSPOSED)):
    b = numbers.standard_normal((101, k) if form == TRANSPOSED else (k, 101)).astype(np.float32)
    a = numbers.standard_normal((300, k)).astype(np.float32)
    whole = multiply(a, b, np.zeros((300, 101), np.float32), 1.0, 0.0, NONE, form)
    for m in (*range(1, 14), 24, 25, 100, 257):
        rows = a[-m:].T.copy() if turned == TRANSPOSED else a[-m:]
        found = multiply(rows, b, np.zeros((m, 101), np.float32), 1.0, 0.0, turned, form)
        same = same and np.array_equal(found, whole[-m:])

shared = ctypes.CDLL(path).shim_shared
counts, found = [shared()], []
for rows in ((1, 3, 8), (9, 100, 257)):
    for m, n, k, form in each_of(rows, (97, 1001), (65, 1111), (NONE, TRANSPOSED)):
        a, b = (numbers.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
        right = b.T.copy() if form == TRANSPOSED else b
        found.append(multiply(a, right, np.zeros((m, n), np.float32), 1.0, 0.0, NONE, form))
        want = a.astype(np.float64) @ b.astype(np.float64)
        assert np.allclose(found[-1], want, atol=2e-5 * (1 + k) ** 0.5), (m, n, k, form)
    counts.append(shared())
digest = blake2b(b"".join(each.tobytes() for each in found)).hexdigest()

shapes = [(rows, 700, 640) for rows in (8, 100, 300)]
cases = [[numbers.standard_normal(shape).astype(np.float32) for shape in ((m, k), (n, k))] for m, n, k in shapes]


def results(_):
    return [multiply(*case, np.zeros((len(case[0]), 700), np.float32), 1.0, 0.0) for case in cases]


first = results(0)
with ThreadPoolExecutor(4) as callers:
    for several in callers.map(results, range(12)):
        assert all(map(np.array_equal, first, several)), "callers on several threads disturb each other"
print(same, counts[1] - counts[0], counts[2] - counts[1], digest)
"""


def compiled(directory: Path, **replaced: str) -> Path:
    """Builds the shim as on another processor, by replacing the names of instruction sets in its source."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = Path(cpu.__file__).with_name("blas.c")
    text = source.read_text()
    for word, other in replaced.items():
        assert word in text
        text = text.replace(word, other)
    (directory / "blas.c").write_text(text)
    library = directory / "shim.so"
    words = [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-Wall", "-Werror", f"-I{source.parent}"]
    subprocess.run([*words, str(directory / "blas.c"), "-o", str(library)], check=True, timeout=120)
    return library


class Kernel(NamedTuple):
    """One run: `same` if a row was the same alone and beside others; the numbers of shared products of few and of many
    rows; a digest of all results."""

    same: bool
    few: int
    many: int
    digest: str


def kernel(library: Path, *threads: int) -> Kernel:
    """Compares products of random shapes and forms with numpy's in float64."""
    done = python("-c", KERNEL, str(library), *map(str, threads or (1, 1)), timeout=120)
    assert done.returncode == 0, done.stderr
    same, few, many, digest = done.stdout.split()
    return Kernel(same == "True", int(few), int(many), digest)


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU wheel needs one")
@pytest.mark.parametrize(
    "replaced", [{'__builtin_cpu_supports("avx512f")': "0"}, {"defined(__x86_64__)": "0"}], ids=["avx2", "plain"]
)
def test_every_product_is_right_on_other_processors(replaced: dict[str, str], tmp_path: Path) -> None:
    library = compiled(tmp_path, **replaced)
    assert kernel(library, 2, 1).digest == kernel(library).digest


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU wheel needs one")
def test_every_product_is_right_and_depends_neither_on_other_rows_nor_on_the_number_of_threads() -> None:
    """Odd shapes of every form, inside larger arrays; any number of rows add their terms in the same order.

    Products of few rows are shared only where they may be.
    """
    library = cpu._shim()
    assert library is not None
    has_vectors = {"avx2", "fma"} <= set(Path("/proc/cpuinfo").read_text().split())
    alone, *others = (kernel(library, *threads) for threads in ((1, 1), (7, 1), (3, 3)))
    assert alone[:3] == (has_vectors, 0, 0)
    assert [(each.few > 0, each.many > 0) for each in others] == [(False, True), (True, True)]
    assert {each.digest for each in others} == {alone.digest}


LOOKS = """
import sys
from pathlib import Path
from runner import cpu
_, choice, *missing = sys.argv
for name in missing:
    if name == "numpy":
        cpu._numpys_openblas = lambda: None
    elif name == "shim":
        cpu._shim = lambda: None
    else:
        cpu._DEBIAN = "libnothing.so.0"
looked = cpu.detect(choice, 3)
loaded = [line for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line]
print(looked.name, looked.advice, "opened" if loaded else "looked", cpu.preload(choice, 3).blas, sep="|")
"""


def looks(choice: str, *missing: str) -> list[str]:
    """Returns what `detect` finds, its advice, whether it opened a library, and what `preload` returns then."""
    return python("-c", LOOKS, choice, *missing, check=True).stdout.strip().split("|")


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU wheel needs one")
def test_a_look_tells_what_preloading_would_take() -> None:
    fast = "numpy's OpenBLAS (3 threads)"
    assert looks("auto") == [fast, "", "looked", fast]
    assert looks("off") == ["MLX's own", f"omit --blas off: {fast} is available", "looked", "MLX's own"]


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU wheel needs one")
@pytest.mark.parametrize(
    ("missing", "advice"),
    [("shim", f"never built; install again: `{install_command()}`"), ("numpy", "install numpy's wheel from PyPI")],
)
def test_without_a_fast_one_it_says_what_to_install(missing: str, advice: str) -> None:
    assert looks("auto", missing, "debian") == ["MLX's own", advice, "looked", f"MLX's own (slow: {advice})"]
    assert looks("off", missing, "debian")[:2] == ["MLX's own", advice]


@pytest.mark.parametrize(
    ("kept", "shown"),
    [(b"", "never built"), (b"\xff", "\ufffd"), (b"x" * 10**6, "x" * 600)],
    ids=["empty", "bytes", "long"],
)
def test_the_remedy_follows_any_kept_reason(
    kept: bytes, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "k.missing").write_bytes(kept)
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    assert cpu._why_missing("k.so") == f"{shown}; install again: `{install_command()}`"


def test_where_mlx_has_no_slow_one_none_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_mlx_runs_on_linux_cpu", lambda: False)
    for choice in ("auto", "off"):
        assert cpu.detect(choice) == cpu.Blas("MLX's own", "", matters=False)
        assert cpu.preload(choice).blas == "MLX's own"


REST = """
import ctypes, threading, time
from runner import cpu
shim = ctypes.CDLL(str(cpu._shim()))
shim.shim_start.restype = ctypes.c_void_p
BLOCK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
share = ctypes.CFUNCTYPE(None, BLOCK, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)(shim.shim_start(2, 2))
caller, helped, held_up, patience_s = threading.get_native_id(), threading.Event(), False, 20


@BLOCK
def block(product, number):
    if threading.get_native_id() == caller:
        helped.wait(patience_s)
        time.sleep(0.002)  # the other thread may take more
    else:
        helped.set()
        time.sleep(0.05 if held_up else 0)


def helped_by(brief):
    helped.clear()
    share(block, None, 8, brief)
    return helped.is_set()


idle = helped_by(True)
held_up, patience_s = True, 0
while helped_by(True):
    pass  # the first loss may be counted against what was gained before
patience_s = 20
print(idle, helped_by(False))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU wheel needs one")
def test_a_short_product_is_computed_alone_after_a_thread_has_held_one_up() -> None:
    assert python("-c", REST, check=True).stdout.split() == ["True", "True"]


CHOICE = """
import sys
from runner import cpu
{before}
print(cpu.find_kernels())
print(cpu.preload("auto", 1, sys.argv[1]).kernels)
import mlx.core as mx
print(mx.fast.rms_norm(mx.array([3.0, 4.0]), None, 0.0).tolist())
"""
KEPT = """
import pathlib
cpu.__file__ = {place!r} + "/__init__.py"
pathlib.Path({place!r}, "_kernels.missing").write_text("no luck\\n")
"""
CHOICES = {
    "off": ("", "off", "(--kernels off)"),
    "never built": ("cpu._KERNELS = 'missing.so'", "auto", "(slow: never built; install again: `{again}`)"),
    "no compiler": (KEPT, "auto", "(slow: no luck; install again: `{again}`)"),
    "no wide vectors": ("cpu._WIDEST = 1", "auto", "(slow: this processor lacks AVX2)"),
    "an older build": (
        "cpu._KERNELS = '_shim.so'  # which lacks the functions of kernels",
        "auto",
        "(slow: built for another version of MLX; install again: `{again}`)",
    ),
    "another MLX": (
        "import ctypes; ctypes.CDLL({stub!r}, mode=ctypes.RTLD_GLOBAL)",
        "auto",
        "(slow: built for another version of MLX; install again: `{again}`)",
    ),
}


def chosen(before: str, choice: str = "auto") -> list[str]:
    """Returns what a look says, what serves, and numbers that MLX computes then."""
    return python("-c", CHOICE.format(before=before), choice, check=True).stdout.splitlines()


@pytest.mark.parametrize("case", CHOICES)
def test_without_kernels_mlx_computes_and_the_log_says_why(case: str, tmp_path: Path) -> None:
    before, choice, why = CHOICES[case]
    source, stub = tmp_path / "stub.cpp", tmp_path / "stub.so"
    if "stub" in before:
        source.write_text('namespace mlx::core { extern const char *version() { return "0.99.0"; } }')
        subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(stub)], check=True, timeout=60)
    looked, used, numbers = chosen(before.format(stub=str(stub), place=str(tmp_path)), choice)
    assert used == f"MLX's own {why.format(again=install_command())}"
    assert case == "off" or looked == used
    assert numbers.startswith("[0.848528")


def test_what_check_says_is_what_serves() -> None:
    looked, used, _ = chosen("")
    assert looked == used
    assert used in ("for AVX2", "for AVX-512", "for NEON")
