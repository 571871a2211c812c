"""The runner's end of a process that follows one grammar."""

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
    """A process that has compiled a format, or is about to. Leads one answer at a time through it.

    Owner: the event loop until its first state is there, then the thread that follows the grammar, until `close`.
    """

    def __init__(self, key: bytes, number: int, memory_bytes: int, give_back: Callable[["Worker"], object]) -> None:
        """`key`: the format as JSON. `give_back` is called by `close`, in the thread that calls that."""
        self.key = key
        self.number = number
        self.memory_bytes = memory_bytes
        """The most that it may take."""
        self.nbytes = 0
        """The memory that it had taken when it last said so."""
        self.awaited = 0
        """States that are on their way."""
        self.broken = False
        """Whether it is good for nothing any more."""
        self.channel, self.other_end = socket.socketpair()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.channel.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self.channel.setblocking(False)
        self._received = bytearray()
        self._give_back = give_back
        self._poll = select.poll()
        self._poll.register(self.channel, select.POLLIN)

    def send(self, step: Follow) -> None:
        """Begin to compute the state behind this step. Raises RequestError if the process is gone."""
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
        """The next state, if it comes within so many seconds. Raises RequestError if the process is gone."""
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
        """These bytes have come from it. Raises RequestError for none, which is all that will ever come."""
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
        """Why it may have ended without a word."""
        return f"it takes more than {shown(self.memory_bytes)} of memory, or breaks llguidance; make it simpler"

    def close(self) -> None:
        """The answer has ended; another one may follow the grammar."""
        self._give_back(self)


class WorkerGrammar:
    """A format that is compiled and waits at the beginning of an answer."""

    def __init__(self, worker: Worker, beginning: State, size: int) -> None:
        """`size` is that of the vocabulary in tokens."""
        self._unused = [worker]  # whoever takes it out has it
        self._beginning = beginning
        self._size = size

    def guide(self) -> Guide:
        """For the answer. Raises RequestError if that has been given up."""
        try:
            return Guide(self._unused.pop(), self._beginning, self._size)
        except IndexError:
            raise RequestError("nobody waits for the answer any more") from None

    def release(self) -> None:
        """There will be no answer. Does nothing if there is a guide."""
        if self._unused:
            self._unused.pop().close()
