"""The runner's side of the grammar processes: the fork server, the workers, and the grammars that workers compile."""

import asyncio
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

import msgspec

from runner.engine.answer_grammar import StateTape
from runner.errors import RequestError
from runner.grammar.guide import Guide, taped_guide
from runner.grammar.messages import ORDER, CompilerSetup, Follow, State, encode_message
from runner.process.child import ChildProcess, Inbox
from runner.sizes import sized

_BUFFER_BYTES = 1 << 20
_START_S = 60
"""The time limit for the process to read the tokenizer: many times what a busy machine needs for the largest one."""


class ForkServer(NamedTuple):
    """The process that forks workers on request. The process ends when the connection to it is closed."""

    child: ChildProcess | None = None
    fault: str = ""
    """The reason why the process could not start; empty if it started."""

    @property
    def alive(self) -> bool:
        """True if the process is running."""
        return self.child is not None and self.child.process.poll() is None

    def order(self, action: bytes, number: int, *channel: int) -> None:
        """Asks the process to fork worker `number`, which serves the descriptor `channel` (FORK), or to kill it (KILL)
        or lower its priority (SLOW) unless it has ended. Does nothing if the process is gone."""
        if self.child is not None:
            with suppress(OSError):
                if channel:
                    socket.send_fds(self.child.connection, [ORDER.pack(action, number)], channel)
                else:  # macOS cannot receive an empty list of descriptors
                    self.child.connection.send(ORDER.pack(action, number))

    def close(self) -> None:
        """Ends the process."""
        if self.child is not None:
            self.child.close()


async def start_fork_server(setup: CompilerSetup) -> ForkServer:
    """Starts the process and waits until it has read the tokenizer, which takes as long as in the runner."""
    try:
        child = ChildProcess("runner.grammar.worker_process")
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


async def _first_state(connection: socket.socket) -> State:
    inbox = Inbox()
    while (message := inbox.next_message()) is None:
        inbox.feed(await asyncio.get_running_loop().sock_recv(connection, _BUFFER_BYTES))
    return msgspec.msgpack.decode(message, type=State)


class Worker:
    """A process that compiles one format and follows one answer at a time through it.

    Owner: the event loop until the first state has come; then, until `close`, the thread that follows the grammar.
    """

    def __init__(
        self,
        key: bytes,
        number: int,
        fork_server: ForkServer,
        memory_bytes: int,
        give_back: Callable[["Worker"], object],
    ) -> None:
        """`key` is the format as JSON. `close` calls `give_back` with this worker, in the thread that calls `close`."""
        self.key = key
        self.number = number
        self.fork_server = fork_server
        self.death = f"it takes more than {sized(memory_bytes)} of memory, or crashes llguidance; make it simpler"
        """The probable reason if the process ends without a message."""
        self.nbytes = 0
        """The memory that the process had allocated when it sent its last state."""
        self.awaited = 0
        """The number of states in flight."""
        self.broken = False
        """True if the worker must not be used for another answer."""
        self.killed_s: float | None = None
        """The time at which the worker was killed because it did not answer; None for all other workers."""
        self.channel, self.other_end = socket.socketpair()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.channel.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self.channel.setblocking(False)
        self._inbox = Inbox()
        self._give_back = give_back
        self._poll = select.poll()
        self._poll.register(self.channel, select.POLLIN)

    def send(self, step: Follow) -> None:
        """Starts to compute the state after `step`. Raises RequestError if the process is gone."""
        message = encode_message(step)
        sent = 0
        with suppress(OSError):
            sent = self.channel.send(message)
        if sent < len(message):
            self.broken = True
            raise RequestError(self.death)
        self.awaited += 1

    def receive(self, patience_s: float) -> State | None:
        """Returns the next state, or None if that takes longer than `patience_s`. Raises RequestError if the process is
        gone or its message is unreadable."""
        until_s = monotonic() + patience_s
        while (state := self.next_state()) is None:
            try:
                self.feed(self.channel.recv(_BUFFER_BYTES))
            except BlockingIOError:
                left_s = until_s - monotonic()
                if left_s <= 0 or not self._poll.poll(left_s * 1e3):
                    return None
            except OSError:
                self.feed(b"")
        return state

    def feed(self, data: bytes) -> None:
        """Adds bytes from the process. Raises RequestError if `data` is empty: the process has ended."""
        try:
            self._inbox.feed(data)
        except EOFError:
            self.broken = True
            raise RequestError(self.death) from None

    def next_state(self) -> State | None:
        """Returns the next state; None while it is incomplete. Raises RequestError for an unreadable message."""
        if (message := self._inbox.next_message()) is None:
            return None
        try:
            state = msgspec.msgpack.decode(message, type=State)
        except msgspec.DecodeError:
            self.broken = True
            raise RequestError("its grammar process sent an unreadable message: send it again") from None
        self.awaited -= 1
        self.nbytes = state.nbytes
        self.broken |= bool(state.error)
        return state

    def close(self) -> None:
        """Ends the answer, and gives the worker back to the pool for another answer."""
        self._give_back(self)


class WorkerGrammar:
    """A compiled format: a worker that waits at the beginning of an answer, or no worker on replay."""

    def __init__(self, worker: Worker | None, beginning: State, size: int) -> None:
        """`size` is the number of tokens in the vocabulary."""
        self._unused = [worker] if worker else []  # only one of `guide` and `release`, in two threads, pops the worker
        self._beginning = beginning
        self._size = size

    def guide(self, tape: StateTape | None = None) -> Guide | None:
        return taped_guide(tape, self._guide, self._size)

    def _guide(self) -> Guide | None:
        with suppress(IndexError):
            return Guide(self._unused.pop(), self._beginning, self._size)
        return None

    def release(self) -> None:
        """Gives the worker back to the pool unused. Does nothing after `guide`."""
        with suppress(IndexError):
            self._unused.pop().close()
