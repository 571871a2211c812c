"""The runner's end of a worker process, which compiles and follows one grammar."""

import select
import socket
from collections.abc import Callable
from time import monotonic

import msgspec

from runner.errors import RequestError
from runner.grammar.guide import Guide
from runner.grammar.messages import HEAD_BYTES, Follow, State, body_length, encode_message
from runner.sizes import shown

_BUFFER_BYTES = 1 << 20


class Worker:
    """A process that compiles one format and follows one answer at a time through it.

    Owner: the event loop until the first state has come, then the thread that follows the grammar, until `close`.
    """

    def __init__(self, key: bytes, number: int, memory_bytes: int, give_back: Callable[["Worker"], object]) -> None:
        """`key` is the format as JSON. `close` calls `give_back`, in the thread that calls `close`."""
        self.key = key
        self.number = number
        self.memory_bytes = memory_bytes
        """The limit on the memory of the process."""
        self.nbytes = 0
        """Memory that the process had allocated when it sent its last state."""
        self.awaited = 0
        """The number of states in flight."""
        self.broken = False
        """True if the worker must not be used again."""
        self.channel, self.other_end = socket.socketpair()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.channel.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self.channel.setblocking(False)
        self._received = bytearray()
        self._give_back = give_back
        self._poll = select.poll()
        self._poll.register(self.channel, select.POLLIN)

    def send(self, step: Follow) -> None:
        """Starts to compute the state after this step. Raises RequestError if the process is gone."""
        message = encode_message(step)
        try:
            sent = self.channel.send(message)
        except OSError:
            sent = 0
        if sent < len(message):
            self.broken = True
            raise RequestError(self.death)
        self.awaited += 1

    def receive(self, patience_s: float) -> State | None:
        """Returns the next state, or None if it takes longer than `patience_s`.

        Raises RequestError if the process is gone or its message is unreadable.
        """
        until_s = monotonic() + patience_s
        while (state := self.take()) is None:
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
        """Adds bytes received from the process. Raises RequestError if `data` is empty: the process has ended."""
        if not data:
            self.broken = True
            raise RequestError(self.death)
        self._received += data

    def take(self) -> State | None:
        """Returns the next state, or None until all of it has come. Raises RequestError for an unreadable message."""
        if len(self._received) < HEAD_BYTES:
            return None
        end = HEAD_BYTES + body_length(self._received[:HEAD_BYTES])
        if len(self._received) < end:
            return None
        try:
            state = msgspec.msgpack.decode(self._received[HEAD_BYTES:end], type=State)
        except msgspec.DecodeError:
            self.broken = True
            raise RequestError("its worker sent an unreadable message") from None
        del self._received[:end]
        self.awaited -= 1
        self.nbytes = state.nbytes
        self.broken |= bool(state.error)
        return state

    @property
    def death(self) -> str:
        """The probable reason why the process ended without a message."""
        return f"it takes more than {shown(self.memory_bytes)} of memory, or crashes llguidance; make it simpler"

    def close(self) -> None:
        """Ends the answer and gives the worker back for another one."""
        self._give_back(self)


class WorkerGrammar:
    """A format compiled by a worker that waits at the beginning of an answer."""

    def __init__(self, worker: Worker, beginning: State, size: int) -> None:
        """`size` is the number of tokens in the vocabulary."""
        self._unused = [worker]  # popping it is atomic: `guide` and `release` may race
        self._beginning = beginning
        self._size = size

    def guide(self) -> Guide:
        """Returns the guide of the answer. Raises RequestError after `release`."""
        try:
            return Guide(self._unused.pop(), self._beginning, self._size)
        except IndexError:
            raise RequestError("the request was cancelled") from None

    def release(self) -> None:
        """Gives the worker back without an answer. Does nothing after `guide`."""
        if self._unused:
            self._unused.pop().close()
