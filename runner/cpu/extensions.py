"""Builds the kernels with MLX's headers, and the wheel that contains them.

The libraries do not use Python, so one wheel serves all versions of Python. If a library cannot be built, the build
continues without it, and writes the reason to a file `NAME.missing` in its place, for `runner.cpu`. When setuptools
loads this module, no other module of this repository can be imported.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from shutil import copy, which

from setuptools import Extension
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError, ExecError

_COMPILERS = ("apt-get install g++", "dnf install gcc-c++", "zypper install gcc-c++", "pacman -S gcc")
"""The command that installs a C++ compiler, for each of some Linux distributions."""


class Wheel(bdist_wheel):
    """`bdist_wheel` for a wheel that any version of Python on this platform can install."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class BuildExtensions(build_ext):
    """`build_ext` that finds MLX's headers, and compiles the sources of an extension at the same time."""

    def run(self) -> None:
        """Builds the extensions on Linux. Does nothing on other platforms, which do not use them."""
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
        """Builds the extensions. Compiles as many sources at the same time as there are cores."""
        compiled, self.compiler.spawn, self.parallel = self.compiler.compile, _spawn, len(self.extensions)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
            self.compiler.compile = lambda sources, **how: [
                path for paths in cores.map(lambda source: compiled([source], **how), sources) for path in paths
            ]
            super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Builds one extension. If that fails, writes the reason to a file and raises the error."""
        library = Path(self.get_ext_fullpath(ext.name))
        _remove(library)
        library.parent.mkdir(parents=True, exist_ok=True)
        try:
            if "mlx" in ext.libraries:
                mlx = _mlx()
                ext.include_dirs, ext.library_dirs = [str(mlx / "include")], [str(mlx / "lib")]
                sys.stderr.write("compiling kernels, about half a minute\n")
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            _remove(library)  # a killed linker leaves an incomplete library
            _reason(library).write_text(f"{error}\n", encoding="utf-8", errors="replace")
            raise


def _mlx() -> Path:
    """Returns the folder of MLX for Linux CPUs where setuptools is installed. Raises CompileError without one."""
    mlx = find_spec("mlx")
    for place in map(Path, (mlx.submodule_search_locations if mlx else None) or ()):
        if (place.parent / "mlx_cpu.libs").is_dir():
            return place
    raise CompileError("the installation found no MLX for CPUs")


def _reason(library: Path) -> Path:
    return library.with_suffix(".missing")


def _remove(library: Path) -> None:
    """Removes the library, or the file with the reason, of an earlier build, which may be for another MLX."""
    for left in library.parent.glob(f"{library.stem}.*"):
        if left.suffix in (".so", ".missing"):
            left.unlink()


def _spawn(command: Sequence[str], **_: object) -> None:
    """Runs a compiler or a linker. Raises ExecError if it is missing, or with the first error that it reports."""
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")  # noqa: S603 - of setuptools
    except FileNotFoundError as error:
        install = next((f" (`sudo {each}`)" for each in _COMPILERS if which(each.split()[0])), "")
        raise ExecError(f"the installation found no {command[0]}{install}") from error
    except OSError as error:
        raise ExecError(f"{command[0]} does not run: {error.strerror}") from error
    sys.stderr.write(done.stderr)
    if done.returncode:
        lines = done.stderr.splitlines()
        first = next((line for line in lines if "error: " in line), f"exit status {done.returncode}")
        raise ExecError(f"the compiler failed: {first}")
