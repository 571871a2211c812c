"""Makes MLX fast on Linux CPUs: loads a BLAS and kernels before MLX itself.

MLX's CPU wheel computes most results one number at a time, on one thread. If a library exports the same functions and
is loaded before MLX with RTLD_GLOBAL, the library's functions replace MLX's, in this process only. Without such a
library, answers are the same up to rounding, but take many times longer.

* `_shim`, from `blas.c`, replaces the reference BLAS. It divides products among its own threads (`pool.h`). `rows.h`
  computes products of float32 on processors with AVX2, the OpenBLAS inside numpy's wheel all others. OpenBLAS's own
  threads are not used: with them, a product takes many times as long while other programs use the cores, and the last
  bits of the result depend on the number of threads.
* `_kernels`, from `mlx.cpp` and `simd.h`, replaces functions of MLX: products with packed weights, the choice
  of experts and their sums, attention, rotary positions, norms, elementwise functions, convolutions of single channels,
  and joins. It adds the scans of recurrences (`scans.h`) and the choice of Phi MoE, which `runner.model` asks for.
  `_kernels` is loaded only for the MLX version that it was built for. In forwards over texts of different lengths,
  padding is left out (`asks_for`).

`preload` is called once, on the main thread, before `mlx` is imported. Read this module first; then `blas.c`, `pool.h`
and `rows.h`; then `kernels.h`, `mlx.cpp` with `operation.h`, and `simd.h`. `cores` counts the cores for the threads of
prompts, and `pages` moves weights to huge pages.
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
_OPENBLAS = "scipy_cblas_{}64_"  # numpy's wheels add this prefix and suffix to OpenBLAS's names of functions
_DEBIAN = "libopenblas.so.0"
_MOST_FOR_ANSWERS = 4
_OWN = "MLX's own"
_SETS = {4: "NEON", 8: "AVX2", 16: "AVX-512"}
"""The number of float32 values in a vector -> the name of the instruction set."""
_WIDEST = max(_SETS)
_KERNELS, _SHIM = "_kernels.so", "_shim.so"
_LONGEST_REASON = 600
"""The most characters shown of a reason that the build kept. A line of the log has room for them and the remedy."""
_in_use: list[ctypes.CDLL] = []
"""The library of the kernels, once the kernels have replaced MLX's functions; else empty."""


class Blas(NamedTuple):
    """The BLAS that a process would use. `name` is a short description. `advice` says how to get a faster BLAS; it is
    empty if there is no faster one. `matters` is False if matrix products do not use a BLAS that can be replaced."""

    name: str
    advice: str = ""
    matters: bool = True


class Kernels(NamedTuple):
    """The kernels that a process would use. `name` is a short description. `why` is the reason why the process would
    not use this package's kernels; empty if it would."""

    name: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


class Preloaded(NamedTuple):
    """Short descriptions of the BLAS and of the kernels that this process uses."""

    blas: str
    kernels: str


class Threads(NamedTuple):
    """The numbers of threads for products of many rows (`prompts`) and of few rows (`answers`)."""

    prompts: int
    answers: int

    @classmethod
    def of(cls, wanted: int | None) -> "Threads":
        """Returns `wanted` threads for both. If that is None, returns a thread for each core for prompts, and up to
        four threads for answers, since a few cores use all the bandwidth of the memory. While other programs use the
        cores, products of few rows are not divided (`pool.h`)."""
        cores = physical_cores()
        return cls(cores, min(cores, _MOST_FOR_ANSWERS)) if wanted is None else cls(wanted, wanted)

    def __str__(self) -> str:
        counted = f"{self.prompts} {'thread' if self.prompts == 1 else 'threads'}"
        return counted if self.prompts == self.answers else f"{counted} for prompts, {self.answers} for answers"


def detect(choice: str = "auto", wanted: int | None = None) -> Blas:
    """Returns the BLAS that `preload` would load, without replacing one: looks for numpy's, and opens another one with
    RTLD_LOCAL. Raises UsageError as `preload` does."""
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
    """Replaces MLX's BLAS and functions by faster ones, and returns descriptions of the BLAS and the kernels in use.

    `choice` is `auto`, `off` or the path of a CBLAS library with 32-bit sizes; `wanted` is the number of threads (see
    `Threads.of`); `kernels` is `auto` or `off`. Must be called before `mlx` is imported. Raises UsageError if a library
    given by path cannot be used.
    """
    threads = Threads.of(wanted)
    return Preloaded(_preload_blas(choice, threads), _preload_kernels(kernels, threads))


def skips_padding() -> bool:
    """Returns True if the kernels are in use, and so leave out tokens that `asks_for` allows them to leave out."""
    return bool(_in_use)


@contextmanager
def asks_for(counts: Sequence[int], length: int) -> Iterator[None]:
    """Marks a block in which this thread builds a forward over tokens of shape [B, length]. Kernels may leave out the
    padding: all tokens of row i after the first `counts[i]`. Each count is at least 1."""
    for library in _in_use:
        library.kernels_ask(len(counts), length, (ctypes.c_int * len(counts))(*counts))
    try:
        yield
    finally:
        for library in _in_use:
            library.kernels_ask(0, 0, None)


def keeps_graphs() -> bool:
    """Returns True if a block of `compiling` makes `mx.compile` keep graphs. MLX asks a shell for the version of g++
    before; the shell complains on the standard error if the working directory was removed."""
    try:
        os.getcwd()  # noqa: PTH109 - importing pathlib would take longer
    except OSError:
        return False
    return bool(_in_use) and any(os.access(f"{folder}/g++", os.X_OK) for folder in os.get_exec_path())


@contextmanager
def compiling() -> Iterator[None]:
    """Marks a block in which `mx.compile` keeps graphs. It fuses no operations in them: on CPUs, fused ones would round
    otherwise, and each would take a run of g++. Without the kernels of this package, the block changes nothing."""
    for library in _in_use:
        library.kernels_compile(True)
    try:
        yield
    finally:
        for library in _in_use:
            library.kernels_compile(False)


def find_kernels(choice: str = "auto") -> Kernels:
    """Returns the kernels that `preload` would use, without replacing any function."""
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
        shim = ctypes.CDLL(str(_shim()))  # for its threads; returns the same library again if it is the BLAS already
        shim.shim_start.restype = ctypes.c_void_p
        share = ctypes.c_void_p(shim.shim_start(*threads))
        ctypes.CDLL(library._name, mode=ctypes.RTLD_GLOBAL)  # from now on its functions replace those of libmlx
        library.kernels_use(_WIDEST, share, *threads)
        _in_use.append(library)
        return str(_described(library))
    except OSError as error:
        return str(Kernels(_OWN, str(error)))


def _opened_kernels(choice: str, *, before: bool = False) -> ctypes.CDLL:
    """Opens the library of kernels, without replacing any function. Raises OSError with the reason if it cannot be used
    here; with `before`, also if MLX was already imported."""
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
        ctypes.CDLL(str(Path(location) / "lib" / "libmlx.so"))  # loaded first, so that the kernels find it by its name
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
    """Returns the reason why library `name` was not built, which the build kept (`extensions.py`), and the remedy."""
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
    """Loads the CBLAS library at `path` with the number of threads for answers, and returns its description."""
    threads = threads._replace(prompts=threads.answers)  # this library has one number of threads for all products
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
    """Sets the number of OpenBLAS's threads. OpenBLAS reads it once, while it is loaded."""
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)


def _numpys_openblas() -> Path | None:
    numpy = importlib.util.find_spec("numpy")
    if numpy is None or numpy.origin is None:
        return None
    libraries = Path(numpy.origin).parent.parent / "numpy.libs"
    return next(libraries.glob("libscipy_openblas64_*.so"), None)


def _load_shim(threads: Threads) -> bool:
    """Makes the shim the BLAS of this process, and starts the shim's threads. Returns False if a library is missing."""
    shim, openblas = _shim(), _numpys_openblas()
    if shim is None or openblas is None:
        return False
    _set_threads(1)  # OpenBLAS gets one: the threads of the shim divide products
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
