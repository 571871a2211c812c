"""Builds the kernels against the MLX that is installed beside setuptools."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from platform import machine

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from runner.cpu.cores import physical_cores


class Build(build_ext):
    """`build_ext`, which finds MLX's headers and compiles sources side by side."""

    def build_extensions(self) -> None:
        """Builds the extensions: on each core, one source is compiled at a time."""
        compiled = self.compiler.compile
        with ThreadPoolExecutor(physical_cores()) as compilers:
            self.compiler.compile = lambda sources, **how: [
                path for paths in compilers.map(lambda source: compiled([source], **how), sources) for path in paths
            ]
            self.parallel = len(self.extensions)
            super().build_extensions()

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
        super().build_extension(ext)
