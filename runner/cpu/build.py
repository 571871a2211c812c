"""Builds the kernels against the MLX that is installed beside setuptools."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from platform import machine

from setuptools import Extension
from setuptools.command.build_ext import build_ext


class Build(build_ext):
    """`build_ext`, which finds MLX's headers and compiles the sources of an extension side by side."""

    def build_extension(self, ext: Extension) -> None:
        """Builds one extension; says why it does not where MLX is missing or has kernels of its own."""
        if ext.name.endswith("._kernels"):
            mlx = find_spec("mlx")
            places = [Path(place) for place in (mlx.submodule_search_locations if mlx else None) or ()]
            places = [place for place in places if (place.parent / "mlx_cpu.libs").is_dir()]
            if sys.platform != "linux" or machine() not in ("x86_64", "aarch64") or not places:
                self.warn(f"{ext.name} is left out: it needs MLX for Linux CPUs, and --no-build-isolation")
                return
            ext.include_dirs = [str(places[0] / "include")]
            ext.library_dirs = [str(places[0] / "lib")]
            ext.sources = self._compiled_first(ext)
        super().build_extension(ext)

    def _compiled_first(self, ext: Extension) -> list[str]:
        """Compiles all sources but the last, each on a thread. Returns the last one, for setuptools."""
        *rest, last = ext.sources
        with ThreadPoolExecutor() as threads:
            compiled = threads.map(lambda source: self._compile(source, ext), rest)
            ext.extra_objects = [*ext.extra_objects, *(each for objects in compiled for each in objects)]
        return [last]

    def _compile(self, source: str, ext: Extension) -> list[str]:
        return self.compiler.compile(
            [source], output_dir=self.build_temp, include_dirs=ext.include_dirs, extra_postargs=ext.extra_compile_args
        )
