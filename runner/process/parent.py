"""The process among other processes: the libraries its parent forces on it, and the end of that parent.

Little is imported here: where the process is restarted, all that was imported before is imported twice.
"""

import os
import select
import signal
import sys
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from runner.errors import RunnerError

_LIBRARY_PATHS = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_CUDA_HOMES = ("CUDA_PATH", "CUDA_HOME")
OLLAMA = "MLX_RUNNER_OLLAMA"
"""The variable by which scripts/ollama-serve tells of Ollama's executable; further ones begin with it."""
FORCED = ("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME")
"""What a host sets for its MLX runners, to libraries of its own; scripts/ollama-serve undoes it."""
CHANGED = (*FORCED, "LC_CTYPE")
"""Variables that differ from those of Ollama's own runner: Python sets the last one, where the locale is C."""
_HOST_CHECK_S = 0.5
_STDERR = 2


def restart_in_own_environment(environ: Mapping[str, str], command: list[str]) -> None:
    """Replace this process by one that sees none of the host's MLX and CUDA libraries and reads file names as UTF-8.

    A host puts its library directories in front of LD_LIBRARY_PATH, and the loader reads that only when a process
    starts; left there, `import mlx` would load the host's libmlx in place of the one it was built with. Of names in
    UTF-8, a Python told to go by a C locale makes texts that neither MLX nor JSON takes.
    """
    wanted = without_host_libraries(environ)
    if sys.getfilesystemencoding() != "utf-8":
        wanted["PYTHONUTF8"] = "1"
    if wanted != dict(environ):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until main() has taken Python's handler away again
        os.execve(sys.executable, command, wanted)  # noqa: S606 - our own command line again


def without_host_libraries(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment less every library directory that is a host's, and less the CUDA homes inside them."""
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
    """The environment that a host had made for its own runner, before scripts/ollama-serve made this one of it."""
    result = {name: value for name, value in environ.items() if not name.startswith(OLLAMA) and name not in CHANGED}
    return result | {name: environ[f"{OLLAMA}_{name}"] for name in CHANGED if f"{OLLAMA}_{name}" in environ}


def check_threads(count: int) -> None:
    """Raises RunnerError unless so many threads can be started, all at once; then they end.

    Later, want of one would be an abort of MLX's, or a wait for a thread that never came to be.
    """
    import _thread  # which does not wait for each thread to have begun

    gate, ended = _thread.allocate_lock(), _thread.allocate_lock()
    waiting = 0

    def pass_through() -> None:
        nonlocal waiting
        with gate:
            waiting -= 1
            if not waiting:
                ended.release()

    ended.acquire()
    with gate:
        try:
            for _ in range(count):
                _thread.start_new_thread(pass_through, ())
                waiting += 1
        except RuntimeError as error:
            raise _too_few_threads(count, waiting) from error
    ended.acquire()


def _too_few_threads(wanted: int, found: int) -> "RunnerError":
    import resource

    from runner.errors import RunnerError

    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "unlimited" if most == resource.RLIM_INFINITY else most
    return RunnerError(
        f"cannot start {wanted} threads, only {found}: raise the limit on processes and threads (`ulimit -u` is"
        f" {limit}; a service has TasksMax, a container its limit of pids)"
    )


def _is_host_directory(entry: str) -> bool:
    """Ollama's `lib/ollama`, or one of the `mlx_*` directories in it."""
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


async def exit_with_host(parent: int) -> "NoReturn":
    """End the process when the host that started it has ended.

    Then it has another parent than `parent`, or, if the host died before we could ask, nobody reads its output.
    """
    import asyncio

    output = select.poll()
    output.register(_STDERR, 0)  # errors are reported unasked
    while os.getppid() == parent and not _is_closed(output):  # noqa: ASYNC110 - no event tells of either
        await asyncio.sleep(_HOST_CHECK_S)
    os._exit(1)


def _is_closed(output: select.poll) -> bool:
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))
