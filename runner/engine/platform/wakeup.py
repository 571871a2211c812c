"""A wake-up of the event loop, from the engine thread, that keeps the GIL."""

import asyncio
import ctypes
import socket
from collections.abc import Callable

_BYTE = b"\0"
_MANY = 4096

_write = ctypes.PyDLL(None).write  # keeps the GIL, unlike all functions of Python that write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Wakeup:
    """Replaces `call_soon_threadsafe`, which releases the GIL while it writes.

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
