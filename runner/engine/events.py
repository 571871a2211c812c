"""The events of one request, sent from the engine to the event loop. A request gets either Refused alone, or Started,
then any number of Text or one Scored, then Finished or Failed."""

import asyncio
import ctypes
import socket
from collections import deque
from collections.abc import Callable

import msgspec

from protocol import DoneReason, Logprob, Metrics


class Refused(msgspec.Struct, frozen=True):
    """The request cannot be computed; the engine found this before the request began."""

    text: str


class Started(msgspec.Struct, frozen=True):
    """The request has left the queue."""


class Text(msgspec.Struct, frozen=True):
    """Text for the client, the log-probabilities of the tokens that end in it, and the counters if wanted."""

    text: str
    logprobs: list[Logprob]
    metrics: Metrics | None


class Scored(msgspec.Struct, frozen=True):
    """The log-probabilities that a request's candidates have right after the prompt, in the order of the candidates."""

    logprobs: list[float]


class Finished(msgspec.Struct, frozen=True):
    """The request ended normally."""

    reason: DoneReason
    metrics: Metrics


class Failed(msgspec.Struct, frozen=True):
    """The request ended with an error; the engine continues with other requests."""

    text: str


Event = Refused | Started | Text | Scored | Finished | Failed


class EventStream:
    """The events of one request, on the event loop's side. It has one reader. Owner: the event loop."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._follow: Callable[[list[Event]], None] | None = None

    def put(self, event: Event) -> None:
        """Appends an event. Call `flush` after the last of several events. Runs on the event loop."""
        self._events.append(event)

    def flush(self) -> None:
        """Gives the waiting events to the reader."""
        if self._follow is None:
            self._arrived.set()
        elif self._events:
            events, self._events = self._events, []
            self._follow(events)

    async def batch(self) -> list[Event]:
        """Returns all events since the last call; waits until there is at least one."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events

    def follow(self, read: Callable[[list[Event]], None]) -> None:
        """Calls `read` with the events so far, and from now on with each batch of events when it arrives. `read` must
        not raise.

        To follow is cheaper than to wait in `batch`, which takes a future and a round of the event loop each time.
        """
        self._follow = read
        self.flush()


class Outbox:
    """Carries events from the engine thread to the event loop. One wake-up serves all events of a slice, or of several
    slices if the event loop is late. Owner: the engine thread, which alone calls `put` and `send`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, wake: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        """`wake` makes the event loop call a function, from the engine thread. Default: `call_soon_threadsafe`."""
        self._loop = loop
        self._wake = wake or loop.call_soon_threadsafe
        self._pending: list[tuple[EventStream, Event]] = []
        self._sent: deque[list[tuple[EventStream, Event]]] = deque()
        self._woken = False  # `_deliver` is going to run; it also delivers what is sent until its end

    def put(self, stream: EventStream, event: Event) -> None:
        """Keeps an event for the next `send`."""
        self._pending.append((stream, event))

    def send(self) -> None:
        """Sends the events since the last call to the event loop. Called at least once in each slice."""
        if self._pending:
            self._sent.append(self._pending)
            self._pending = []
            if not self._woken:
                self._woken = True
                self._wake(self._deliver)

    def _deliver(self) -> None:
        """Puts all sent events into their streams, and flushes each stream once. Runs on the event loop."""
        streams: dict[EventStream, None] = {}
        while self._sent:
            for stream, event in self._sent.popleft():
                stream.put(event)
                streams[stream] = None
        for stream in streams:
            stream.flush()
        self._woken = False
        if self._sent:  # sent during the flush, without a wake-up: deliver after other tasks of the loop
            self._woken = True
            self._loop.call_soon(self._deliver)


_BYTE = b"\0"
_MANY = 4096

_write = ctypes.PyDLL(None).write  # keeps the GIL, unlike Python's own functions for writing
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Wakeup:
    """Wakes the event loop from the engine thread without giving up the GIL.

    `call_soon_threadsafe` releases the GIL while it writes. Then the event loop takes the GIL and keeps it until all
    lines are written; meanwhile the engine waits and the device is idle. With `wake`, the event loop gets the GIL a
    little later, when the engine has dispatched the next forward and waits for MLX.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Must be called on the event loop."""
        self._loop = loop
        self._call: Callable[[], None] = lambda: None
        self._inside, self._outside = socket.socketpair()
        for end in (self._inside, self._outside):
            end.setblocking(False)
        self._number = self._outside.fileno()
        loop.add_reader(self._inside, self._answer)

    def wake(self, call: Callable[[], None]) -> None:
        """Makes the event loop call `call` soon. Called from the engine thread, and not again before `call` has run."""
        self._call = call
        if _write(self._number, _BYTE, 1) != 1:
            self._loop.call_soon_threadsafe(call)

    def _answer(self) -> None:
        self._inside.recv(_MANY)
        self._call()
