"""The runner's end of the fork server: the process that holds the vocabulary and is forked for each worker."""

import asyncio
import subprocess
import sys
from contextlib import suppress
from socket import send_fds, socket, socketpair
from typing import NamedTuple

import msgspec

from runner.engine.guide import State
from runner.grammar.messages import FORK, KILL, ORDER, SLOW, CompilerSetup, Inbox, encode_message

_PROGRAM = """
import socket, sys
sys.path[:] = {path!a}
from runner.grammar.worker_process import run_fork_server
run_fork_server(socket.socket(fileno={descriptor}))
"""
_START_S = 60
"""For the process to read the tokenizer: many times what a busy machine takes for the largest."""
_RECEIVE_BYTES = 1 << 16


class ForkServer(NamedTuple):
    """The process that forks workers on request. It ends when `control` is closed."""

    process: "subprocess.Popen[bytes] | None" = None
    control: socket | None = None
    fault: str = ""
    """The reason why there is no process; empty if there is one."""

    @property
    def alive(self) -> bool:
        """True if the process is running."""
        return self.process is not None and self.process.poll() is None

    def fork(self, number: int, channel: socket) -> None:
        """Forks a worker that serves `channel`. Does nothing if the process is gone."""
        if self.control is not None:
            with suppress(OSError):
                send_fds(self.control, [ORDER.pack(FORK, number)], [channel.fileno()])

    def kill(self, number: int) -> None:
        """Kills a worker, if it is still running."""
        self._order(KILL, number)

    def slow(self, number: int) -> None:
        """Lowers the priority of a worker below that of all other processes."""
        self._order(SLOW, number)

    def close(self) -> None:
        """Closes this end, and ends the process if it has not."""
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            self.process.kill()  # it may not end by itself, and the event loop waits for it
            self.process.wait()

    def _order(self, order: bytes, number: int) -> None:
        if self.control is not None:
            with suppress(OSError):
                self.control.send(ORDER.pack(order, number))


async def start_fork_server(setup: CompilerSetup) -> ForkServer:
    """Starts the process and waits until it has read the tokenizer, which takes as long as in the runner itself."""
    loop = asyncio.get_running_loop()
    control, theirs = socketpair()
    control.setblocking(False)
    program = _PROGRAM.format(path=sys.path, descriptor=theirs.fileno())
    try:
        process = subprocess.Popen(  # noqa: ASYNC220, S603 - returns as soon as the program has been started
            [sys.executable, "-I", "-X", f"utf8={sys.flags.utf8_mode}", "-c", program],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the host reads the runner's output to its end, even after the runner is gone
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        control.close()
        return ForkServer(fault=f"Format: cannot start a process to compile it: {error.strerror}")
    finally:
        theirs.close()
    try:
        async with asyncio.timeout(_START_S):
            await loop.sock_sendall(control, encode_message(setup))
            fault = (await _first_state(control)).error
    except TimeoutError:
        fault = f"Format: the compiler process was not ready within {_START_S} s"
    except OSError:
        fault = "Format: the compiler process ended at once"
    except msgspec.DecodeError:
        fault = "Format: the compiler process sent an unreadable message"
    if fault:
        ForkServer(process, control).close()
        return ForkServer(fault=fault)
    return ForkServer(process, control)


async def _first_state(control: socket) -> State:
    inbox = Inbox()
    while (state := inbox.take(State)) is None:
        data = await asyncio.get_running_loop().sock_recv(control, _RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError
        inbox.feed(data)
    return state
