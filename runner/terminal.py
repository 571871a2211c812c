"""The last line of a terminal, written anew again and again while log lines go by above it."""

import os
import select
import threading
from contextlib import suppress

_STDERR = 2
_COLUMNS = 80


class StatusLine:
    """A line that stays below everything else. Any thread may call any method.

    Nothing is shown until `enable`: whoever reads a pipe wants no line twice.
    """

    def __init__(self, number: int = _STDERR) -> None:
        """`number` is the descriptor of the terminal."""
        self._number = number
        self._enabled = False
        self._shown = ""
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(number, select.POLLOUT)

    def enable(self) -> bool:
        """From now on lines are shown, if this is a terminal; returns whether it is one."""
        self._enabled = os.isatty(self._number)
        return self._enabled

    def show(self, text: str) -> bool:
        """Put this in place of what is shown, one line of printable text; nothing takes it away. Returns whether there
        is anybody to see it."""
        if not self._enabled:
            return False
        with self._lock:
            if self._poll.poll(0):  # a terminal that was stopped (^S) must not stop whoever has something to say
                text = text[: self._columns - 1]
                with suppress(OSError):  # nobody looks any more
                    os.write(self._number, self.blank + text.encode())
                self._shown = text
        return True

    def write(self, line: bytes) -> None:
        """Write a line, its newline included, above what is shown. Raises OSError."""
        with self._lock:
            os.write(self._number, self.blank + line + self._shown.encode())

    @property
    def blank(self) -> bytes:
        """What takes away what is shown, to be written before anything else."""
        return b"\r" + b" " * len(self._shown) + b"\r" if self._shown else b""

    @property
    def _columns(self) -> int:
        with suppress(OSError):
            return os.get_terminal_size(self._number).columns or _COLUMNS
        return _COLUMNS


STATUS_LINE = StatusLine()
"""That of stderr: there is one, as there is one log."""
