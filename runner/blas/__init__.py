"""A fast BLAS for MLX on Linux CPUs, loaded before MLX itself.

MLX's CPU wheel carries the reference BLAS: one scalar thread. A library that exports the same three `cblas_*gemm`
functions and is loaded with RTLD_GLOBAL first takes their place, in this process only. Nothing depends on it: without
one, everything gives the same answers, many times slower.
"""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

from runner.errors import UsageError

_NEEDED = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_OPENBLAS = "scipy_cblas_{}64_"  # how numpy's wheels prefix and suffix the functions of their OpenBLAS


def preload(choice: str = "auto", threads: int = 1) -> str:
    """Put a fast BLAS in front of MLX's own and say in a few words which one it is.

    `choice` is `auto`, `off` or the path of a CBLAS library with 32-bit sizes. Must run before `mlx` is imported;
    UsageError when a library that was asked for by path cannot be used.
    """
    if choice == "off" or (choice == "auto" and not _mlx_runs_on_linux_cpu()):
        return "MLX's own"
    if "mlx.core" in sys.modules:
        return "MLX's own (mlx was imported first)"
    # OpenBLAS reads the number of its threads once, while it is being loaded.
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    plural = "thread" if threads == 1 else "threads"
    if choice != "auto":
        _load_cblas(choice)
        return f"{choice} ({threads} {plural})"
    if _load_shim():
        return f"numpy's OpenBLAS ({threads} {plural})"
    try:
        _load_cblas("libopenblas.so.0")
    except UsageError:
        return "MLX's own (slow: install a C compiler and reinstall, or Debian's libopenblas0-pthread)"
    return f"libopenblas.so.0 ({threads} {plural})"


def _mlx_runs_on_linux_cpu() -> bool:
    if sys.platform != "linux":
        return False
    mlx = importlib.util.find_spec("mlx")
    locations = mlx.submodule_search_locations if mlx else None
    return any((Path(location).parent / "mlx_cpu.libs").is_dir() for location in locations or ())


def _load_cblas(path: str) -> None:
    try:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise UsageError(f"--blas {path}: cannot be loaded: {error}") from error
    missing = [name for name in _NEEDED if not hasattr(library, name)]
    if missing:
        raise UsageError(f"--blas {path}: not a CBLAS library, it lacks {', '.join(missing)}")


def _load_shim() -> bool:
    shim = next(Path(__file__).parent.glob("_shim.*.so"), None)
    numpy = importlib.util.find_spec("numpy")
    if shim is None or numpy is None or numpy.origin is None:
        return False
    libraries = Path(numpy.origin).parent.parent / "numpy.libs"
    openblas = next(libraries.glob("libscipy_openblas64_*.so"), None)
    if openblas is None:
        return False
    try:
        target = ctypes.CDLL(str(openblas))
        functions = [
            ctypes.cast(getattr(target, _OPENBLAS.format(name)), ctypes.c_void_p)
            for name in ("sgemm", "dgemm", "cgemm", "sgemv")
        ]
        ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL).shim_use(*functions)
    except (OSError, AttributeError):
        return False
    return True
