"""A status line at the bottom of a terminal, rewritten in place while log lines scroll above it."""

import os
import select
import threading
from contextlib import suppress

_STDERR = 2
_COLUMNS = 80


class StatusLine:
    """A line below all other output. Nothing is shown until `enable` is called: in a pipe, each rewritten line would
    appear again. Any thread may call any method."""

    def __init__(self, number: int = _STDERR) -> None:
        """`number` is the descriptor of the terminal."""
        self._number = number
        self._enabled = False
        self._shown = ""
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(number, select.POLLOUT)

    def enable(self) -> bool:
        """Shows lines from now on, if the descriptor is a terminal. Returns True if it is one."""
        self._enabled = os.isatty(self._number)
        return self._enabled

    def show(self, text: str) -> bool:
        """Replaces the line by `text`, which must be printable; empty removes it. Returns True if lines are shown."""
        if not self._enabled:
            return False
        with self._lock:
            if self._poll.poll(0):  # a stopped terminal (^S) must not stop the process
                text = text[: self._columns - 1]
                with suppress(OSError):  # the terminal is gone
                    os.write(self._number, self.blank + text.encode())
                self._shown = text
        return True

    def write(self, line: bytes) -> None:
        """Writes a line, which includes its newline, above the status line. Raises OSError."""
        with self._lock:
            os.write(self._number, self.blank + line + self._shown.encode())

    @property
    def blank(self) -> bytes:
        """The bytes that remove the status line. Write them before other output."""
        return b"\r" + b" " * len(self._shown) + b"\r" if self._shown else b""

    @property
    def _columns(self) -> int:
        with suppress(OSError):
            return os.get_terminal_size(self._number).columns or _COLUMNS
        return _COLUMNS


STATUS_LINE = StatusLine()
"""The status line of this process, on stderr."""
