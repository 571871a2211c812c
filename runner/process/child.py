"""A child process of the runner for code that may hang, crash or exhaust memory: its start, its messages, its end.

The child serves one connection. It ends when the runner closes the runner's end of the connection; if the runner dies,
the system closes that end. The child does not inherit the runner's output streams, since a host waits until all their
holders have ended. Each message is bytes, after its length in four bytes.
"""

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn
from weakref import finalize

_PROGRAM = """
import sys
sys.path[:] = {path!a}
from runner.process.child import run_child
from {module} import serve
run_child(serve, {descriptor})
"""
_HEAD = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 16
_MOST_JOINED_BYTES = 1 << 20


class ChildProcess:
    """The runner's side of a child process. The process is killed by `close`, or when this object is collected."""

    def __init__(self, module: str) -> None:
        """Starts a process that calls the function `serve` of `module`. Raises OSError if no process can start."""
        self.connection, theirs = socket.socketpair()
        program = _PROGRAM.format(path=sys.path, module=module, descriptor=theirs.fileno())
        try:
            process = subprocess.Popen(  # noqa: S603 - this program
                [sys.executable, "-I", "-X", f"utf8={sys.flags.utf8_mode}", "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()
        self.process = process
        self.close = finalize(self, _end, process, self.connection)
        """Ends the process and closes the connection. Later calls do nothing."""


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    process.kill()  # it might never end by itself, and the next lines wait for it
    connection.close()
    process.wait()


def run_child(serve: "Callable[[Channel], object]", descriptor: int) -> NoReturn:
    """Runs in the child process: calls `serve`, then ends the process; also ends it if the runner or memory is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the runner decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError, OSError, MemoryError):
        serve(Channel(socket.socket(fileno=descriptor)))
    os._exit(0)


def framed(message: bytes) -> bytes:
    """Returns the bytes to send: the length of the message, then the message."""
    return _HEAD.pack(len(message)) + message


class Inbox:
    """Collects the bytes that arrive over a connection, and divides them into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> None:
        """Adds received bytes. Raises EOFError if `data` is empty: the other side has closed its end."""
        if not data:
            raise EOFError
        self._received += data

    def next_message(self) -> bytes | None:
        """Removes and returns the next message; returns None while the message is incomplete."""
        received = self._received
        if len(received) < _HEAD.size:
            return None
        end = _HEAD.size + _HEAD.unpack_from(received)[0]
        if len(received) < end:
            return None
        message = bytes(received[_HEAD.size : end])
        del received[:end]
        return message


class Channel:
    """One end of a connection, for a thread that may wait for the other end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._inbox = Inbox()

    def send(self, message: bytes | memoryview) -> None:
        """Sends a message. Waits while the other end has no room. Raises OSError if the other end is closed."""
        if len(message) <= _MOST_JOINED_BYTES:
            self.connection.sendall(framed(bytes(message)))
        else:
            self.connection.sendall(_HEAD.pack(len(message)))
            self.connection.sendall(message)

    def receive(self) -> bytes:
        """Waits for the next message. Raises EOFError or OSError if the other side has closed its end."""
        while (message := self._inbox.next_message()) is None:
            self._inbox.feed(self.connection.recv(_RECEIVE_BYTES))
        return message
