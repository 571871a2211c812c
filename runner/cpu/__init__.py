"""Makes MLX fast on Linux CPUs: a BLAS and kernels that are loaded before MLX itself.

MLX's CPU wheel computes most things one number at a time, on one thread. A library that exports the same functions and
is loaded earlier with RTLD_GLOBAL replaces them, in this process only. Without it, answers are the same up to rounding,
and many times slower.

* `_shim`, from `blas.c`, replaces the reference BLAS: it forwards products to the OpenBLAS inside numpy's wheel and
  shares them among threads (`pool.h`); `rows.h` has the products of a decode step. OpenBLAS's own threads are not used:
  with them a product takes many times as long while other programs want the cores, and its last bits depend on their
  number.
* `_kernels`, from `mlx.cpp`, `simd.h` and `integers.h`, replaces functions of MLX: products with packed weights,
  attention, rotary positions, norms, elementwise functions, and joins of large arrays. It is loaded only for exactly
  the MLX that it was built for. In a forward over texts of different lengths it leaves out the padding that `asks_for`
  names.

`preload` is called once, on the main thread, before `mlx` is imported. Read this module first, then `blas.c`, `pool.h`
and `rows.h`; `kernels.h`, `mlx.cpp`, `simd.h` and `integers.h`. `cores` counts the cores that prompts are read on.
"""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from runner.cpu.cores import physical_cores
from runner.errors import UsageError
from runner.versions import install_command

_NEEDED = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_OPENBLAS = "scipy_cblas_{}64_"  # numpy's wheels prefix and suffix the functions of their OpenBLAS
_DEBIAN = "libopenblas.so.0"
_MOST_FOR_ANSWERS = 4
_OWN = "MLX's own"
_SETS = {4: "NEON", 8: "AVX2", 16: "AVX-512"}
"""The number of float32 numbers in a vector -> the instruction set."""
_WIDEST = max(_SETS)
_KERNELS, _SHIM = "_kernels.so", "_shim.so"
_LONGEST_REASON = 600
"""The most characters of a kept reason that are shown: a line of the log holds them and the remedy."""
_in_use: list[ctypes.CDLL] = []
"""The kernels, once they stand before MLX's."""


class Blas(NamedTuple):
    """A short description of the BLAS that a process would use. `advice` explains how to get a faster one; empty if
    there is none. `matters` is False if matrix products do not use a BLAS that can be replaced."""

    name: str
    advice: str = ""
    matters: bool = True


class Kernels(NamedTuple):
    """A short description of the kernels that a process would use. `why` is the reason why they are not this package's;
    empty if they are."""

    name: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


class Preloaded(NamedTuple):
    """Short descriptions of the BLAS and of the kernels that a process uses."""

    blas: str
    kernels: str


class Threads(NamedTuple):
    """The numbers of threads for products of many rows, as in prompts, and of few rows, as in answers."""

    prompts: int
    answers: int

    @classmethod
    def of(cls, wanted: int | None) -> "Threads":
        """Returns `wanted` threads for both; if None, a thread per core for prompts, and up to four for answers, since
        a few cores exhaust the memory's bandwidth. While other programs want the cores, products of few rows are not
        shared (`pool.h`)."""
        cores = physical_cores()
        return cls(cores, min(cores, _MOST_FOR_ANSWERS)) if wanted is None else cls(wanted, wanted)

    def __str__(self) -> str:
        counted = f"{self.prompts} {'thread' if self.prompts == 1 else 'threads'}"
        return counted if self.prompts == self.answers else f"{counted} for prompts, {self.answers} for answers"


def detect(choice: str = "auto", wanted: int | None = None) -> Blas:
    """Returns the BLAS that `preload` would load, without replacing any: looks for numpy's, and opens others with
    RTLD_LOCAL. Raises UsageError like `preload`."""
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


def preload(choice: str = "auto", wanted: int | None = None, kernels: str = "auto") -> Preloaded:
    """Puts a fast BLAS and the kernels in front of MLX's own, and returns descriptions of those in use.

    `choice` is `auto`, `off` or the path of a CBLAS library with 32-bit sizes; `wanted` is the number of threads (see
    `Threads.of`); `kernels` is `auto` or `off`. Call it before `mlx` is imported. Raises UsageError if a library given
    by path cannot be used.
    """
    threads = Threads.of(wanted)
    return Preloaded(_preload_blas(choice, threads), _preload_kernels(kernels, threads))


def skips_padding() -> bool:
    """Returns True if the kernels leave out positions that `asks_for` does not ask for."""
    return bool(_in_use)


@contextmanager
def asks_for(counts: Sequence[int], length: int) -> Iterator[None]:
    """Marks a block in which this thread builds a forward over tokens [B, length]. Of each row, kernels may leave out
    all tokens but the first `counts`, at least one."""
    for library in _in_use:
        library.kernels_ask(len(counts), length, (ctypes.c_int * len(counts))(*counts))
    try:
        yield
    finally:
        for library in _in_use:
            library.kernels_ask(0, 0, None)


def find_kernels(choice: str = "auto") -> Kernels:
    """Returns the kernels that `preload` would put in front of MLX, without doing so."""
    try:
        return _described(_opened_kernels(choice))
    except OSError as error:
        return Kernels(_OWN, str(error))


def _preload_blas(choice: str, threads: Threads) -> str:
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


def _preload_kernels(choice: str, threads: Threads) -> str:
    try:
        library = _opened_kernels(choice, before=True)
        shim = ctypes.CDLL(str(_shim()))  # for its threads; if it is the BLAS, it is the one that was loaded
        shim.shim_start.restype = ctypes.c_void_p
        share = ctypes.c_void_p(shim.shim_start(*threads))
        ctypes.CDLL(library._name, mode=ctypes.RTLD_GLOBAL)  # from now on it stands before libmlx
        library.kernels_use(_WIDEST, share, *threads)
        _in_use.append(library)
        return str(_described(library))
    except OSError as error:
        return str(Kernels(_OWN, str(error)))


def _opened_kernels(choice: str, *, before: bool = False) -> ctypes.CDLL:
    """Returns the library, which nothing uses yet. With `before`, MLX must not have been imported. Raises OSError with
    the reason if the library cannot serve here."""
    if choice == "off":
        raise OSError("--kernels off")
    if before and "mlx.core" in sys.modules:
        raise OSError("mlx was imported first")
    if not _mlx_runs_on_linux_cpu():
        raise OSError("only MLX for Linux CPUs needs others")
    built, mlx = _built(_KERNELS), importlib.util.find_spec("mlx")
    if built is None or _shim() is None:
        raise OSError(f"slow: {_why_missing(_SHIM if built else _KERNELS)}")
    for location in (mlx.submodule_search_locations if mlx else None) or ():
        ctypes.CDLL(str(Path(location) / "lib" / "libmlx.so"))  # by name, the kernels find it in memory
    library = ctypes.CDLL(str(built))
    if not (hasattr(library, "kernels_fit") and library.kernels_fit()):
        raise OSError(f"slow: built for another version of MLX; install again: `{install_command()}`")
    return library


def _shim() -> Path | None:
    return _built(_SHIM)


def _built(name: str) -> Path | None:
    library = Path(__file__).with_name(name)
    return library if library.is_file() else None


def _why_missing(name: str) -> str:
    """Returns the reason that the build kept (`extensions.py`), and the remedy."""
    try:
        with Path(__file__).with_name(name).with_suffix(".missing").open(encoding="utf-8", errors="replace") as kept:
            reason = kept.read(_LONGEST_REASON).strip()
    except OSError:
        reason = ""
    return f"{reason or 'never built'}; install again: `{install_command()}`"


def _described(library: ctypes.CDLL) -> Kernels:
    width: int = library.kernels_width(_WIDEST)
    return Kernels(f"for {_SETS[width]}") if width else Kernels(_OWN, "slow: this processor lacks AVX2")


def _advice() -> str:
    return _why_missing(_SHIM) if _numpys_openblas() else "install numpy's wheel from PyPI"


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


def _numpys_openblas() -> Path | None:
    numpy = importlib.util.find_spec("numpy")
    if numpy is None or numpy.origin is None:
        return None
    libraries = Path(numpy.origin).parent.parent / "numpy.libs"
    return next(libraries.glob("libscipy_openblas64_*.so"), None)


def _load_shim(threads: Threads) -> bool:
    """Makes the shim this process's BLAS, and starts its threads. Returns False if something is missing."""
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
        library = ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
        library.shim_use(*functions)
        library.shim_start(*threads)
    except (OSError, AttributeError):
        return False
    return True
