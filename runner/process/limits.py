"""File descriptors: every connection takes one, and the usual limit of a shell is 256 or 1024."""

import asyncio
import errno
import resource
from pathlib import Path
from time import monotonic

from runner.logs import Log

log = Log(__name__)
_MACOS_MOST = 10240  # where the hard limit is "infinity", which cannot be set
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG_EVERY_S = 10.0


def raise_limit() -> None:
    """Raises the limit on open files to what the system allows, as Go programs do."""
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
    """Returns how many more files this process may open."""
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
