"""Waking the event loop from the engine thread without letting go of the GIL."""

import asyncio
import ctypes
import socket
from collections.abc import Callable

_BYTE = b"\0"
_MANY = 4096

_write = ctypes.PyDLL(None).write  # unlike every function of Python's own that writes, it keeps the GIL
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Wakeup:
    """In place of `call_soon_threadsafe`, which lets go of the GIL while it writes.

    There the event loop wakes, takes the GIL, and keeps it until all lines are written; the engine waits for it, and
    the device has nothing to do. Here it gets the GIL a little later, when the engine has dispatched the next forward
    and waits for MLX.
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
        """Have the event loop call this soon; not again before it has. From another thread."""
        self._call = call
        if _write(self._number, _BYTE, 1) != 1:
            self._loop.call_soon_threadsafe(call)

    def _answer(self) -> None:
        self._inside.recv(_MANY)
        self._call()
