"""The process and its parent: the environment that the parent sets for the process, and the end of the parent.

This module imports little: after the process is restarted, everything that was imported before is imported again.
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
"""The variable for Ollama's executable, and the prefix of the other variables of `mlx-runner ollama serve`."""
FORCED = ("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME")
"""Variables that a host sets to its libraries for MLX runners; `mlx-runner ollama serve` restores the variables."""
CHANGED = (*FORCED, "LC_CTYPE")
"""Variables with other values than in Ollama's own runner. Python sets LC_CTYPE if the locale is C."""
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")
"""The values to which Python sets LC_CTYPE if the locale is C."""
_HOST_CHECK_S = 0.5
_STDERR = 2


def restart_in_own_environment(environ: Mapping[str, str], command: list[str]) -> None:
    """Replaces this process, unless that is needless, by one without the host's libraries and with file names in UTF-8.

    A host puts its library directories at the front of LD_LIBRARY_PATH. With them, `import mlx` would load the host's
    libmlx. The loader reads the variable only when a process starts, hence the new process. Under a C locale, Python
    decodes UTF-8 file names into texts that neither MLX nor JSON accepts.
    """
    wanted = without_host_libraries(environ)
    if sys.getfilesystemencoding() != "utf-8":
        wanted["PYTHONUTF8"] = "1"
    if wanted != dict(environ):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until main() has removed Python's handler
        os.execve(sys.executable, command, wanted)  # noqa: S606 - this process's own command line


def given_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without Python's change: Python sets LC_CTYPE when it starts with the locale C. Only
    Linux keeps the former value; on other systems the changed value stays."""
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
    """Returns the environment without the host's library directories, and without CUDA homes in such directories."""
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
    """Returns the environment that the host made for its own runner, as it was before the shim changed it."""
    result = {name: value for name, value in environ.items() if not name.startswith(OLLAMA) and name not in CHANGED}
    return result | {name: environ[f"{OLLAMA}_{name}"] for name in CHANGED if f"{OLLAMA}_{name}" in environ}


def _is_host_directory(entry: str) -> bool:
    """Returns True for a `lib/ollama` directory, an `mlx_*` directory, or a directory with MLX's libraries."""
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
    """Returns True if the host ended before this process read the id `parent`, so that `parent` is not the host but a
    process that adopted this one. The adopter then is in another session, while a host's child is in the host's session
    or leads its own. An adopter in the same session, such as a container's first process, is taken for the host."""
    session = os.getsid(0)
    try:
        return session != os.getpid() and session != os.getsid(parent)
    except OSError:  # the parent is hidden, or has ended since; `exit_with_host` notices the latter
        return False


async def exit_with_host(parent: int) -> "NoReturn":
    """Ends the process when the host that started it has ended. Then the parent of this process is no longer `parent`
    or, if the host died before the first check, nobody can read this process's output."""
    import asyncio

    output = select.poll()
    output.register(_STDERR, 0)  # poll() always reports errors and hang-ups
    while os.getppid() == parent and not _is_closed(output):  # noqa: ASYNC110 - there is no event for either condition
        await asyncio.sleep(_HOST_CHECK_S)
    os._exit(1)


def _is_closed(output: select.poll) -> bool:
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))
