"""File descriptors: every connection takes one, and a shell lets a process have 256 or 1024 of them."""

import asyncio
import errno
import resource
from pathlib import Path
from time import monotonic

from runner.logs import Log

log = Log(__name__)
_MACOS_MOST = 10240  # where the hard limit is "infinity", which nobody may ask for
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TOLD_EVERY_S = 10.0


def raise_limit() -> None:
    """Let this process open as many files as the system allows it, as Go programs do."""
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
    """How many more this process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(list(Path("/dev/fd").iterdir()))


class DescriptorShortage:
    """The event loop's exception handler: tells in one line that connections must wait, and leaves the rest as it is.

    Without a descriptor left asyncio tries again every second, and each time writes a hundred tracebacks.
    """

    def __init__(self) -> None:
        self._told = float("-inf")

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """For `loop.set_exception_handler`."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _USED_UP or "socket" not in context:
            loop.default_exception_handler(context)
        elif monotonic() - self._told >= _TOLD_EVERY_S:
            self._told = monotonic()
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            log.warning("new connections must wait", reason=error.strerror or "", descriptors=limit)
