"""Loads a fast BLAS for MLX on Linux CPUs, before MLX itself.

MLX's CPU wheel contains the reference BLAS, which is scalar and has one thread. A library that exports the same three
`cblas_*gemm` functions and is loaded earlier with RTLD_GLOBAL replaces them, in this process only. It is only faster:
without it, all answers are the same, many times slower.

`_shim`, compiled from `shim.c`, forwards the calls to the OpenBLAS inside numpy's wheel, and shares large products
among threads (`pool.h`); `rows.h` has kernels for the products of a decode step; `cores` counts the cores that prompts
are read on. OpenBLAS's own threads are not used: with them a product takes many times as long while other programs want
the cores, and its last bits depend on their number. `preload` is called once, on the main thread, before `mlx` is
imported; nothing else here has state. Read this module first, then `shim.c`, `pool.h` and `rows.h`.
"""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import NamedTuple

from runner.blas.cores import physical_cores
from runner.errors import UsageError

_NEEDED = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_OPENBLAS = "scipy_cblas_{}64_"  # numpy's wheels prefix and suffix the functions of their OpenBLAS
_DEBIAN = "libopenblas.so.0"
_OWN = "MLX's own"


class Blas(NamedTuple):
    """A short description of the BLAS that a process would use.

    `advice` tells how to get a faster one; empty if there is none. `matters` is False if matrix products do not use a
    BLAS that can be replaced.
    """

    name: str
    advice: str = ""
    matters: bool = True

    @property
    def is_slow(self) -> bool:
        """True for the reference BLAS, which computes one number at a time."""
        return self.matters and self.name == _OWN


class Threads(NamedTuple):
    """The numbers of threads for products of many rows, as in prompts, and of few rows, as in answers."""

    prompts: int
    answers: int

    @classmethod
    def of(cls, wanted: int | None) -> "Threads":
        """Returns `wanted` threads for both; without a wish, a thread per core for prompts, and one for answers.

        Answers are bound by memory, so that more threads would only take processor time from others.
        """
        return cls(physical_cores(), 1) if wanted is None else cls(wanted, wanted)

    def __str__(self) -> str:
        counted = f"{self.prompts} {'thread' if self.prompts == 1 else 'threads'}"
        return counted if self.prompts == self.answers else f"{counted} for prompts, {self.answers} for answers"


def detect(choice: str = "auto", wanted: int | None = None) -> Blas:
    """Returns the BLAS that `preload` would load, without replacing any.

    Numpy's is only looked for; others are opened with RTLD_LOCAL. Raises UsageError like `preload`.
    """
    threads = Threads.of(wanted)
    if not _mlx_runs_on_linux_cpu():
        return Blas(_OWN if choice in ("auto", "off") else _opened(choice, threads, ctypes.RTLD_LOCAL), matters=False)
    if choice not in ("auto", "off"):
        return Blas(_opened(choice, threads, ctypes.RTLD_LOCAL))
    if _shim() and _numpys_openblas():
        fast = Blas(f"numpy's OpenBLAS ({threads})")
    else:
        try:
            fast = Blas(_opened(_DEBIAN, threads, ctypes.RTLD_LOCAL))
        except UsageError:
            return Blas(_OWN, _advice())
    return Blas(_OWN, f"omit --blas off: {fast.name} is available") if choice == "off" else fast


def preload(choice: str = "auto", wanted: int | None = None) -> str:
    """Replaces MLX's own BLAS by a fast one, and returns a short description of the one in use.

    `choice` is `auto`, `off` or the path of a CBLAS library with 32-bit sizes; `wanted` is its number of threads, None
    for those of `Threads.of`. Must run before `mlx` is imported. Raises UsageError if a library given by path cannot be
    used.
    """
    threads = Threads.of(wanted)
    if choice == "off" or (choice == "auto" and not _mlx_runs_on_linux_cpu()):
        return _OWN
    if "mlx.core" in sys.modules:
        return f"{_OWN} (mlx was imported first)"
    if choice != "auto":
        return _opened(choice, threads, ctypes.RTLD_GLOBAL)
    if _load_shim(threads):
        return f"numpy's OpenBLAS ({threads})"
    try:
        return _opened(_DEBIAN, threads, ctypes.RTLD_GLOBAL)
    except UsageError:
        return f"{_OWN} (slow: {_advice()})"


def _advice() -> str:
    missing = "a C compiler and this package again" if _numpys_openblas() else "numpy's wheel from PyPI"
    return f"install {missing}, or Debian's libopenblas0-pthread"


def _mlx_runs_on_linux_cpu() -> bool:
    if sys.platform != "linux":
        return False
    mlx = importlib.util.find_spec("mlx")
    locations = mlx.submodule_search_locations if mlx else None
    return any((Path(location).parent / "mlx_cpu.libs").is_dir() for location in locations or ())


def _opened(path: str, threads: Threads, mode: int) -> str:
    """Loads a CBLAS library, with as many threads as answers need, and returns its description."""
    threads = threads._replace(prompts=threads.answers)  # nothing stands before it that could change the number
    _set_threads(threads.prompts)
    try:
        library = ctypes.CDLL(path, mode=mode)
    except OSError as error:
        raise UsageError(f"--blas {path}: cannot be loaded: {error}; --blas auto finds one") from error
    missing = [name for name in _NEEDED if not hasattr(library, name)]
    if missing:
        raise UsageError(f"--blas {path}: not a CBLAS library, it lacks {', '.join(missing)}; --blas auto finds one")
    return f"{path} ({threads})"


def _set_threads(threads: int) -> None:
    """Sets the number of threads, which OpenBLAS reads once, while it is loaded."""
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)


def _shim() -> Path | None:
    return next(Path(__file__).parent.glob("_shim.*.so"), None)


def _numpys_openblas() -> Path | None:
    numpy = importlib.util.find_spec("numpy")
    if numpy is None or numpy.origin is None:
        return None
    libraries = Path(numpy.origin).parent.parent / "numpy.libs"
    return next(libraries.glob("libscipy_openblas64_*.so"), None)


def _load_shim(threads: Threads) -> bool:
    shim, openblas = _shim(), _numpys_openblas()
    if shim is None or openblas is None:
        return False
    _set_threads(1)  # the threads of the shim share products
    try:
        target = ctypes.CDLL(str(openblas))
        functions = [
            ctypes.cast(getattr(target, _OPENBLAS.format(name)), ctypes.c_void_p)
            for name in ("sgemm", "dgemm", "cgemm", "sgemv")
        ]
        ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL).shim_use(*functions, *threads)
    except (OSError, AttributeError):
        return False
    return True
