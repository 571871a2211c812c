"""The process and its parent: the environment that the parent gives it, and the end of the parent.

This module imports little: when the process is restarted, everything imported before is imported twice.
"""

import os
import select
import signal
import sys
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_LIBRARY_PATHS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_CUDA_HOMES = ("CUDA_PATH", "CUDA_HOME")
OLLAMA = "MLX_RUNNER_OLLAMA"
"""The variable in which `mlx-runner ollama serve` passes on Ollama's executable; its other variables begin with it."""
FORCED = ("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME")
"""Variables that a host sets to its own libraries for its MLX runners; `mlx-runner ollama serve` restores them."""
CHANGED = (*FORCED, "LC_CTYPE")
"""Variables whose values differ from those of Ollama's own runner. Python sets the last one if the locale is C."""
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")
"""The values that Python gives LC_CTYPE if the locale is C."""
_HOST_CHECK_S = 0.5
_STDERR = 2


def restart_in_own_environment(environ: Mapping[str, str], command: list[str]) -> None:
    """Replaces this process by one that sees none of the host's MLX and CUDA libraries and reads file names as UTF-8.

    A host puts its library directories in front of LD_LIBRARY_PATH, and the loader reads that only when a process
    starts. With them, `import mlx` would load the host's libmlx in place of its own. Under a C locale, Python decodes
    UTF-8 file names into texts that neither MLX nor JSON takes.
    """
    wanted = without_host_libraries(environ)
    if sys.getfilesystemencoding() != "utf-8":
        wanted["PYTHONUTF8"] = "1"
    if wanted != dict(environ):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until main() has removed Python's handler
        os.execve(sys.executable, command, wanted)  # noqa: S606 - our own command line again


def given_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment as it was before Python started, which sets LC_CTYPE if the locale is C. Only Linux keeps
    the former value; on other systems Python's stays."""
    result = dict(environ)
    if result.get("LC_CTYPE") in _COERCED:
        try:
            with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - pathlib would be imported
                given = [entry[9:] for entry in file.read().split(b"\0") if entry.startswith(b"LC_CTYPE=")]
        except OSError:
            return result
        del result["LC_CTYPE"]
        if given:
            result["LC_CTYPE"] = os.fsdecode(given[0])
    return result


def without_host_libraries(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the host's library directories, and without the CUDA homes inside them."""
    result = dict(environ)
    for variable in _LIBRARY_PATHS:
        if variable in result:
            kept = [entry for entry in result[variable].split(os.pathsep) if not _is_host_directory(entry)]
            if kept != result[variable].split(os.pathsep):
                result[variable] = os.pathsep.join(kept)
                if not any(kept):
                    del result[variable]
    for variable in _CUDA_HOMES:
        if variable in result and _is_host_directory(result[variable]):
            del result[variable]
    return result


def with_host_libraries(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that the host had made for its own runner, before the shim changed it."""
    result = {name: value for name, value in environ.items() if not name.startswith(OLLAMA) and name not in CHANGED}
    return result | {name: environ[f"{OLLAMA}_{name}"] for name in CHANGED if f"{OLLAMA}_{name}" in environ}


def _is_host_directory(entry: str) -> bool:
    """Returns True for Ollama's `lib/ollama`, for the `mlx_*` directories in it, and for any with MLX's libraries."""
    if not entry:
        return False
    parts = [part for part in entry.split(os.sep) if part not in ("", ".")]  # noqa: PTH206 - pathlib would be imported
    *_, parent, name = ("", "", *parts)
    if name.startswith("mlx_") or (parent, name) == ("lib", "ollama"):
        return True
    try:
        with os.scandir(entry) as found:
            return any(_is_host_library(each) for each in found)
    except OSError:
        return False


def _is_host_library(found: "os.DirEntry[str]") -> bool:
    return found.name.startswith(("libmlx.", "libmlxc.")) or (found.name.startswith("mlx_") and found.is_dir())


def was_adopted(parent: int) -> bool:
    """Returns True if the host had ended before `parent` was read. The parent is then an adopter in another session: a
    child is in the session of its parent, unless it leads one of its own. An adopter in the same session, such as a
    shell that is the first process of a container, is taken for the host."""
    session = os.getsid(0)
    try:
        return session != os.getpid() and session != os.getsid(parent)
    except OSError:  # the parent is hidden, or has ended since, which `exit_with_host` notices
        return False


async def exit_with_host(parent: int) -> "NoReturn":
    """Ends the process when the host that started it has ended: its parent is no longer `parent` or, if the host died
    before the first check, its output has no reader."""
    import asyncio

    output = select.poll()
    output.register(_STDERR, 0)  # poll() reports errors without being asked for them
    while os.getppid() == parent and not _is_closed(output):  # noqa: ASYNC110 - there is no event for either
        await asyncio.sleep(_HOST_CHECK_S)
    os._exit(1)


def _is_closed(output: select.poll) -> bool:
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))
