"""The event loop: its wake-up from another thread, and its log line when no descriptor is left."""

import asyncio
import ctypes
import errno
import resource
import socket
from collections.abc import Callable
from time import monotonic

from runner.logs import Log

log = Log(__name__)
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG_EVERY_S = 10.0
_BYTE = b"\0"
_MANY = 4096

_write = ctypes.PyDLL(None).write  # keeps the GIL, unlike all functions of Python that write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Wakeup:
    """Wakes the event loop from another thread, in place of `call_soon_threadsafe`, which releases the GIL while it
    writes.

    Then the event loop wakes, takes the GIL, and keeps it until all lines are written, while the engine waits and the
    device is idle. Here the event loop gets the GIL a little later, when the engine has dispatched the next forward and
    waits for MLX.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Made on the event loop."""
        self._loop = loop
        self._call: Callable[[], None] = lambda: None
        self._inside, self._outside = socket.socketpair()
        for end in (self._inside, self._outside):
            end.setblocking(False)
        self._number = self._outside.fileno()
        loop.add_reader(self._inside, self._answer)

    def wake(self, call: Callable[[], None]) -> None:
        """Makes the event loop call this soon. Called from another thread, and not again before that call."""
        self._call = call
        if _write(self._number, _BYTE, 1) != 1:
            self._loop.call_soon_threadsafe(call)

    def _answer(self) -> None:
        self._inside.recv(_MANY)
        self._call()


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
