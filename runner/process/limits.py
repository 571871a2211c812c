"""The process's limits on threads and on file descriptors, of which every connection takes one."""

import _thread  # unlike threading, it does not wait until a thread has begun
import asyncio
import errno
import mmap
import resource
from pathlib import Path
from time import monotonic

from runner.errors import RunnerError
from runner.logs import Log

log = Log(__name__)
_MACOS_MOST = 10240  # the hard limit there is "infinity", which cannot be set
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG_EVERY_S = 10.0
_STACK_BYTES = 2 << 20
"""The stack of a thread if the stack of a process has no limit."""


def check_threads(count: int) -> None:
    """Raises RunnerError unless `count` threads can run at the same time. Starts them and lets them end: later, a
    missing thread would make MLX abort the process, or a wait for it never end."""
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
    """Returns the error, while the threads that were found still run. The system gives the same reason for one thread
    too many and for a lack of address space."""

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
    """Raises the limit on open files as far as the system allows, as Go programs do."""
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
    """Returns the number of files that this process may still open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(list(Path("/dev/fd").iterdir()))


class DescriptorShortage:
    """The event loop's exception handler, which logs in one line that connections must wait.

    If no descriptor is left, asyncio tries again every second, and would log a hundred tracebacks each time. All other
    exceptions are handled as by default.
    """

    def __init__(self) -> None:
        self._logged_s = float("-inf")

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Handles an exception, as an argument of `loop.set_exception_handler`."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _USED_UP or "socket" not in context:
            loop.default_exception_handler(context)
        elif monotonic() - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = monotonic()
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            log.warning("new connections must wait", reason=error.strerror or "", descriptors=limit)
