"""Makes an empty MLX library, for hosts on machines on which they cannot load a real one.

A host since v0.34.1 loads an MLX model, and since v0.32.10 pulls one, only if the host itself could load `libmlxc`,
though only runners compute with it. Without an NVIDIA GPU it cannot load its own `libmlxc`. The empty library has every
function that a host looks up. The functions that read tensors, which come before all computing, fail with a clear
message; all other functions do nothing. A host looks for this library last, and so prefers its own.
"""

import re
import shutil
import subprocess
from pathlib import Path

LIBRARY = "libmlxc.so"
_CHECKED = b"MLX runtime is not available"
"""A text in the executables of all hosts that need the library."""
_FUNCTION = re.compile(rb"mlx_[a-z0-9_]*[a-z0-9](?=\0)")
_COMPILE_S = 60

_SOURCE = """\
typedef void report(const char *, void *);
static report *reported;
static void *data;
void mlx_set_error_handler(report *handler, void *its, void (*end)(void *)) { reported = handler; data = its; }
static long nothing(void) { return 0; }
static long failure(void) {
  if (reported) reported("Ollama has no working MLX library; mlx-runner ollama serve gave it an empty one", data);
  return 1;
}
"""


def library_functions(executable: Path) -> list[str]:
    """Returns the functions that a host looks up in its MLX library; none if the host does not need the library."""
    content = executable.read_bytes()
    if _CHECKED not in content:
        return []
    starts = ((found.start(), found.end()) for found in _FUNCTION.finditer(content))
    return sorted({content[start - content.startswith(b"_", start - 1) : end].decode() for start, end in starts})


def write_library(executable: Path, directory: Path) -> bool:
    """Writes the library into `directory` if the host needs it. Returns False if there is no working compiler."""
    names = library_functions(executable)
    if not names:
        return True
    compiler = shutil.which("cc")
    if compiler is None:
        return False
    source = _SOURCE + "".join(
        f'long {name}(void) __attribute__((alias("{"failure" if name.startswith("mlx_load") else "nothing"}")));\n'
        for name in names
        if name != "mlx_set_error_handler"
    )
    command = [compiler, "-x", "c", "-w", "-shared", "-fPIC", "-o", str(directory / LIBRARY), "-"]
    try:
        subprocess.run(command, input=source.encode(), capture_output=True, check=True, timeout=_COMPILE_S)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        (directory / LIBRARY).unlink(missing_ok=True)
        return False
    return True
