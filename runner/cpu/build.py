"""Builds the kernels against MLX's headers, and the wheel that carries them.

The libraries use nothing of Python, so one wheel serves all its versions. Where a library cannot be built, the build
goes on without it: a file beside its place, `NAME.missing`, holds the reason for `runner.cpu`.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import copy, copyfileobj, which
from tempfile import TemporaryFile

from setuptools import Extension
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

from runner.cpu.cores import physical_cores

_COMPILERS = ("apt-get install g++", "dnf install gcc-c++", "zypper install gcc-c++", "pacman -S gcc")
"""The commands that install a C++ compiler, by distribution."""


class Wheel(bdist_wheel):
    """`bdist_wheel`, for any Python on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Build(build_ext):
    """`build_ext`, which finds MLX's headers and compiles the sources of an extension side by side."""

    def run(self) -> None:
        """Builds the extensions on Linux; nothing else has a use for them."""
        if sys.platform == "linux":
            super().run()

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            place, built = map(Path, self._get_inplace_equivalent(self.get_finalized_command("build_py"), ext))
            _remove(place)
            if not built.exists():
                copy(_reason(built), _reason(place))
        super().copy_extensions_to_source()

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extensions(self) -> None:
        """Builds the extensions, with a compiler for each core."""
        compiled = self.compiler.compile
        with ThreadPoolExecutor(physical_cores()) as cores:
            self.compiler.compile = lambda sources, **how: [
                path for paths in cores.map(lambda source: compiled([source], **how), sources) for path in paths
            ]
            super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Builds one extension, or keeps the reason for which it cannot."""
        library = Path(self.get_ext_fullpath(ext.name))
        _remove(library)
        library.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._require_compiler(ext)
            if "mlx" in ext.libraries:
                mlx = _mlx()
                ext.include_dirs, ext.library_dirs = [str(mlx / "include")], [str(mlx / "lib")]
                sys.stderr.write("compiling kernels, about half a minute\n")
            with _first_error():
                super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            _reason(library).write_text(f"{error}\n")
            raise

    def _require_compiler(self, ext: Extension) -> None:
        program = (self.compiler.compiler_so_cxx if ext.language == "c++" else self.compiler.compiler_so)[0]
        if which(program) is None:
            install = next((each for each in _COMPILERS if which(each.split()[0])), None)
            raise CompileError(f"the installation found no {program}" + (f" (`sudo {install}`)" if install else ""))


def _mlx() -> Path:
    """Returns the folder of MLX for Linux CPUs beside setuptools. Raises CompileError if there is none."""
    mlx = find_spec("mlx")
    for place in map(Path, (mlx.submodule_search_locations if mlx else None) or ()):
        if (place.parent / "mlx_cpu.libs").is_dir():
            return place
    raise CompileError("the installation found no MLX for CPUs")


def _reason(library: Path) -> Path:
    return library.with_suffix(".missing")


def _remove(library: Path) -> None:
    """Removes what former builds left in the place of a library: nothing says which MLX that was for."""
    for left in library.parent.glob(f"{library.stem}.*"):
        if left.suffix in (".so", ".missing"):
            left.unlink()


@contextmanager
def _first_error() -> Iterator[None]:
    """Puts the compiler's first error in place of its exit status. What it writes is passed on at the end."""
    with TemporaryFile() as written:
        stderr = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            yield
        except CCompilerError as error:
            written.seek(0)
            lines = written.read().decode(errors="replace").splitlines()
            first = next((line for line in lines if " error: " in line), None)
            if first is None:
                raise
            raise CompileError(f"the compiler failed: {first}") from error
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            copyfileobj(written, sys.stderr.buffer)
