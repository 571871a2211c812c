"""The library directories that a host puts in front of its runner's own (docs/internals/wire.md, 1.3), with decoys
inside."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path


def write_decoys(directory: Path) -> Path:
    """Makes `mlx_cuda_v13` with headers and a libmlx.so that has nothing in it, as bad as a host's older one.

    Returns `directory`, for `spawn(libraries=...)`.
    """
    backend = directory / "mlx_cuda_v13"
    (backend / "include").mkdir(parents=True)
    library = backend / "libmlx.so"
    compiler = shutil.which("cc")
    if compiler is None:
        library.write_bytes(b"not a library")
    else:
        source = directory / "empty.c"
        source.write_text("int mlx_decoy(void) { return 0; }\n")
        command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libmlx.so", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
    return directory


def library_environment(directory: Path, inherited: Mapping[str, str], *, cuda_headers: bool = True) -> dict[str, str]:
    """The variables that a Linux host sets when `directory` is its `lib/ollama`.

    `cuda_headers` is false for hosts before v0.19.0.
    """
    backends = sorted(directory.glob("mlx_*"))
    previous = [inherited["LD_LIBRARY_PATH"]] if inherited.get("LD_LIBRARY_PATH") else []
    environment = {"LD_LIBRARY_PATH": os.pathsep.join([str(directory), *map(str, backends), *previous])}
    with_headers = (path for path in backends if path.name.startswith("mlx_cuda_") and (path / "include").exists())
    if cuda_headers and (first := next(with_headers, None)):
        environment |= {"CUDA_PATH": str(first), "CUDA_HOME": str(first)}
    return environment
