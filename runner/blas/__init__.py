"""Loads a fast BLAS for MLX on Linux CPUs, before MLX itself.

MLX's CPU wheel contains the reference BLAS, which is scalar and has one thread. A library that exports the same three
`cblas_*gemm` functions and is loaded earlier with RTLD_GLOBAL replaces them, in this process only. It is only faster:
without it, all answers are the same, many times slower.

`_shim`, compiled from `shim.c`, forwards the calls to the OpenBLAS inside numpy's wheel; `rows.h` has kernels for the
products of a decode step. `preload` is called once, on the main thread, before `mlx` is imported; nothing here has
state. Read this module first, then `shim.c`, then `rows.h`.
"""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import NamedTuple

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


def detect(choice: str = "auto", threads: int = 1) -> Blas:
    """Returns the BLAS that `preload` would load, without replacing any.

    Numpy's is only looked for; others are opened with RTLD_LOCAL. Raises UsageError like `preload`.
    """
    if not _mlx_runs_on_linux_cpu():
        return Blas(_OWN if choice in ("auto", "off") else _opened(choice, threads, ctypes.RTLD_LOCAL), matters=False)
    if choice not in ("auto", "off"):
        return Blas(_opened(choice, threads, ctypes.RTLD_LOCAL))
    if _shim() and _numpys_openblas():
        fast = Blas(f"numpy's OpenBLAS ({_counted(threads)})")
    else:
        try:
            fast = Blas(_opened(_DEBIAN, threads, ctypes.RTLD_LOCAL))
        except UsageError:
            return Blas(_OWN, _advice())
    return Blas(_OWN, f"omit --blas off: {fast.name} is available") if choice == "off" else fast


def preload(choice: str = "auto", threads: int = 1) -> str:
    """Replaces MLX's own BLAS by a fast one, and returns a short description of the one in use.

    `choice` is `auto`, `off` or the path of a CBLAS library with 32-bit sizes. Must run before `mlx` is imported.
    Raises UsageError if a library given by path cannot be used.
    """
    if choice == "off" or (choice == "auto" and not _mlx_runs_on_linux_cpu()):
        return _OWN
    if "mlx.core" in sys.modules:
        return f"{_OWN} (mlx was imported first)"
    if choice != "auto":
        return _opened(choice, threads, ctypes.RTLD_GLOBAL)
    if _load_shim(threads):
        return f"numpy's OpenBLAS ({_counted(threads)})"
    try:
        return _opened(_DEBIAN, threads, ctypes.RTLD_GLOBAL)
    except UsageError:
        return f"{_OWN} (slow: {_advice()})"


def _advice() -> str:
    missing = "a C compiler and this package again" if _numpys_openblas() else "numpy's wheel from PyPI"
    return f"install {missing}, or Debian's libopenblas0-pthread"


def _counted(threads: int) -> str:
    return f"{threads} {'thread' if threads == 1 else 'threads'}"


def _mlx_runs_on_linux_cpu() -> bool:
    if sys.platform != "linux":
        return False
    mlx = importlib.util.find_spec("mlx")
    locations = mlx.submodule_search_locations if mlx else None
    return any((Path(location).parent / "mlx_cpu.libs").is_dir() for location in locations or ())


def _opened(path: str, threads: int, mode: int) -> str:
    """Loads a CBLAS library and returns its description."""
    _set_threads(threads)
    try:
        library = ctypes.CDLL(path, mode=mode)
    except OSError as error:
        raise UsageError(f"--blas {path}: cannot be loaded: {error}; --blas auto finds one") from error
    missing = [name for name in _NEEDED if not hasattr(library, name)]
    if missing:
        raise UsageError(f"--blas {path}: not a CBLAS library, it lacks {', '.join(missing)}; --blas auto finds one")
    return f"{path} ({_counted(threads)})"


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


def _load_shim(threads: int) -> bool:
    shim, openblas = _shim(), _numpys_openblas()
    if shim is None or openblas is None:
        return False
    _set_threads(threads)
    try:
        target = ctypes.CDLL(str(openblas))
        functions = [
            ctypes.cast(getattr(target, _OPENBLAS.format(name)), ctypes.c_void_p)
            for name in ("sgemm", "dgemm", "cgemm", "sgemv")
        ]
        ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL).shim_use(*functions, threads)
    except (OSError, AttributeError):
        return False
    return True
