"""The runner's end of the process that holds the vocabulary, from which workers are forked."""

import asyncio
import subprocess
import sys
from contextlib import suppress
from socket import send_fds, socket, socketpair
from typing import NamedTuple

import msgspec

from runner.grammar.messages import (
    FORK,
    HEAD_BYTES,
    KILL,
    ORDER,
    SLOW,
    CompilerSetup,
    State,
    body_length,
    encode_message,
)

_PROGRAM = """
import socket, sys
sys.path[:] = {path!a}
from runner.grammar.worker_process import serve
serve(socket.socket(fileno={descriptor}))
"""


class ForkServer(NamedTuple):
    """A process that forks workers when it is told to. Ends when `control` is closed."""

    process: "subprocess.Popen[bytes] | None" = None
    control: socket | None = None
    fault: str = ""
    """Why there is none."""

    @property
    def alive(self) -> bool:
        """Whether it can be told anything."""
        return self.process is not None and self.process.poll() is None

    def fork(self, number: int, channel: socket) -> None:
        """Fork a worker that serves the channel. If the process is gone, nobody will."""
        if self.control is not None:
            with suppress(OSError):
                send_fds(self.control, [ORDER.pack(FORK, number)], [channel.fileno()])

    def kill(self, number: int) -> None:
        """End a worker, if it is still there."""
        self._order(KILL, number)

    def slow(self, number: int) -> None:
        """Let everybody else's work go before that of this worker."""
        self._order(SLOW, number)

    def _order(self, order: bytes, number: int) -> None:
        if self.control is not None:
            with suppress(OSError):
                self.control.send(ORDER.pack(order, number))


async def start_fork_server(setup: CompilerSetup) -> ForkServer:
    """The process, once it has read the tokenizer; that takes as long as the start of the runner's own does."""
    loop = asyncio.get_running_loop()
    control, theirs = socketpair()
    control.setblocking(False)
    program = _PROGRAM.format(path=sys.path, descriptor=theirs.fileno())
    try:
        process = subprocess.Popen(  # noqa: ASYNC220, S603 - returns as soon as the program has been started
            [sys.executable, "-I", "-X", f"utf8={sys.flags.utf8_mode}", "-c", program],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the host reads ours to its end, also when we are gone
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        control.close()
        return ForkServer(fault=f"Format: no process can be started to compile it: {error.strerror}")
    finally:
        theirs.close()
    try:
        await loop.sock_sendall(control, encode_message(setup))
        head = await _exactly(control, HEAD_BYTES)
        fault = msgspec.msgpack.decode(await _exactly(control, body_length(head)), type=State).error
    except OSError:
        fault = "Format: the process that was started to compile it ended at once"
    except msgspec.DecodeError:
        fault = "Format: the process that was started to compile it sent an unreadable message"
    if fault:
        control.close()
        process.wait()
        return ForkServer(fault=fault)
    return ForkServer(process, control)


async def _exactly(control: socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(control, count - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data
