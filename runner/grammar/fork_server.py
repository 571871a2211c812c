"""The runner's end of the fork server: the process that holds the vocabulary and is forked for each worker."""

import asyncio
from contextlib import suppress
from socket import send_fds, socket
from typing import NamedTuple

import msgspec

from runner.grammar.guide import State
from runner.grammar.messages import FORK, KILL, ORDER, SLOW, CompilerSetup, encode_message
from runner.process.child import Child, Inbox

_START_S = 60
"""For the process to read the tokenizer: many times what a busy machine takes for the largest."""
_RECEIVE_BYTES = 1 << 16


class ForkServer(NamedTuple):
    """The process that forks workers on request. It ends when its connection is closed."""

    child: Child | None = None
    fault: str = ""
    """The reason why there is no process; empty if there is one."""

    @property
    def alive(self) -> bool:
        """True if the process is running."""
        return self.child is not None and self.child.process.poll() is None

    def fork(self, number: int, channel: socket) -> None:
        """Forks a worker that serves `channel`. Does nothing if the process is gone."""
        if self.child is not None:
            with suppress(OSError):
                send_fds(self.child.connection, [ORDER.pack(FORK, number)], [channel.fileno()])

    def kill(self, number: int) -> None:
        """Kills a worker, if it is still running."""
        self._order(KILL, number)

    def slow(self, number: int) -> None:
        """Lowers the priority of a worker below that of all other processes."""
        self._order(SLOW, number)

    def close(self) -> None:
        """Ends the process."""
        if self.child is not None:
            self.child.close()

    def _order(self, order: bytes, number: int) -> None:
        if self.child is not None:
            with suppress(OSError):
                self.child.connection.send(ORDER.pack(order, number))


async def start_fork_server(setup: CompilerSetup) -> ForkServer:
    """Starts the process and waits until it has read the tokenizer, which takes as long as in the runner itself."""
    try:
        child = Child("runner.grammar.worker_process")
    except OSError as error:
        return ForkServer(fault=f"Format: cannot start a process to compile it: {error.strerror}")
    child.connection.setblocking(False)
    try:
        async with asyncio.timeout(_START_S):
            await asyncio.get_running_loop().sock_sendall(child.connection, encode_message(setup))
            fault = (await _first_state(child.connection)).error
    except TimeoutError:
        fault = f"Format: the compiler process was not ready within {_START_S} s"
    except (EOFError, OSError):
        fault = "Format: the compiler process ended at once"
    except msgspec.DecodeError:
        fault = "Format: the compiler process sent an unreadable message"
    if fault:
        child.close()
        return ForkServer(fault=fault)
    return ForkServer(child)


async def _first_state(connection: socket) -> State:
    inbox = Inbox()
    while (message := inbox.next_message()) is None:
        inbox.feed(await asyncio.get_running_loop().sock_recv(connection, _RECEIVE_BYTES))
    return msgspec.msgpack.decode(message, type=State)
