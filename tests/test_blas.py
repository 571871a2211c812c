"""A fast BLAS is in front of MLX's own, and its answers are the same to rounding."""

import subprocess
import sys

import pytest

PRODUCTS = """
from runner import blas
print(blas.preload({choice!r}))
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


def run(choice: str) -> tuple[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS.format(choice=choice)], capture_output=True, text=True, timeout=60, check=True
    )
    name, worst = done.stdout.splitlines()
    return name, float(worst)


CALLS = """
import ctypes
from pathlib import Path
from runner import blas
blas.preload()
import mlx.core as mx
shim = ctypes.CDLL(str(next(Path(blas.__file__).parent.glob("_shim.*.so"))))
x = mx.ones((8, 8))
for product in (x @ x, x[:1] @ x.T):
    before = shim.shim_calls()
    mx.eval(product)
    print(shim.shim_calls() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU wheel needs one")
def test_mlx_calls_the_shim_for_its_products() -> None:
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "1"]


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX's Linux CPU wheel needs one")
def test_the_set_up_built_the_shim_and_auto_uses_it() -> None:
    name, worst = run("auto")
    assert name == "numpy's OpenBLAS (1 thread)"
    assert worst < 1e-4


def test_off_leaves_mlx_alone() -> None:
    name, worst = run("off")
    assert name == "MLX's own"
    assert worst < 1e-4


@pytest.mark.parametrize("library", ["/nonexistent/libblas.so", "libm.so.6"])
def test_a_library_that_is_no_blas_is_refused_by_name(library: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from runner import blas; blas.preload({library!r})"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f"UsageError: --blas {library}: " in done.stderr
