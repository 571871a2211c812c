"""The limits of the process on threads and on file descriptors. Every connection takes one file descriptor."""

import _thread  # unlike `threading`, `_thread` does not wait until a thread has begun
import asyncio
import errno
import mmap
import resource
from pathlib import Path
from time import monotonic

from runner.errors import RunnerError
from runner.logs import Log

log = Log(__name__)
_MACOS_MOST = 10240  # on macOS the hard limit is "infinity", which cannot be set
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG_EVERY_S = 10.0
_STACK_BYTES = 2 << 20
"""The size of a thread's stack if the stack of a process has no limit."""


def check_threads(count: int) -> None:
    """Raises RunnerError unless `count` threads can run at the same time. Tries this with threads that end again:
    later, if a thread could not start, MLX would abort the process, or code would wait for it for ever."""
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


def _too_few_threads(wanted: int, found: int) -> RunnerError:
    """Returns the error for too few threads. Called while the `found` threads still run: the system reports the same
    error for too many threads and for too little address space, and this function tells them apart."""

    def shown(limit: int, unit: int = 1) -> str:
        most, _ = resource.getrlimit(limit)
        return "unlimited" if most == resource.RLIM_INFINITY else str(most // unit)

    advice = (
        f"raise the limit on processes and threads (`ulimit -u` is {shown(resource.RLIMIT_NPROC)}; for a service it is"
        " TasksMax, for a container its limit of pids)"
    )
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    try:
        mmap.mmap(-1, _STACK_BYTES if stack == resource.RLIM_INFINITY else stack).close()
    except (OSError, OverflowError):
        advice = (
            f"there is no address space for their stacks: raise the limit on it (`ulimit -v` is"
            f" {shown(resource.RLIMIT_AS, 1024)}; for a service it is LimitAS), or lower that of a stack (`ulimit -s`"
            f" is {shown(resource.RLIMIT_STACK, 1024)})"
        )
    return RunnerError(f"cannot start {wanted} threads, only {found}: {advice}")


def raise_limit() -> None:
    """Raises the limit on open files to the highest value that the system allows, as Go programs do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, _MACOS_MOST):
        if wanted != resource.RLIM_INFINITY and wanted <= soft:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            continue
        return


def free_descriptors() -> int:
    """Returns the number of further files that this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(list(Path("/dev/fd").iterdir()))


class DescriptorShortage:
    """An exception handler for the event loop. It logs a lack of file descriptors in one line.

    If no descriptor is left, connections must wait: asyncio tries again every second, and its default handler would log
    a hundred tracebacks each time. All other exceptions go to the default handler.
    """

    def __init__(self) -> None:
        self._logged_s = float("-inf")

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Handles an exception. Pass this method to `loop.set_exception_handler`."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _USED_UP or "socket" not in context:
            loop.default_exception_handler(context)
        elif monotonic() - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = monotonic()
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            log.warning("new connections must wait", reason=error.strerror or "", descriptors=limit)
