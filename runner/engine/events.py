"""The events of one request, from the engine to the event loop: Refused; or Started, Text... or Scored, and Finished or
Failed.
"""

import asyncio
import ctypes
import socket
from collections import deque
from collections.abc import Callable

import msgspec

from protocol import DoneReason, Logprob, Metrics


class Refused(msgspec.Struct, frozen=True):
    """The request cannot be computed, and this is known before it starts."""

    text: str


class Started(msgspec.Struct, frozen=True):
    """The request has left the queue."""


class Text(msgspec.Struct, frozen=True):
    """Text to deliver, the log-probabilities of the tokens that end in it, and the counters so far if wanted."""

    text: str
    logprobs: list[Logprob]
    metrics: Metrics | None


class Scored(msgspec.Struct, frozen=True):
    """The log-probabilities of a request's candidates, in their order, right after its prompt."""

    logprobs: list[float]


class Finished(msgspec.Struct, frozen=True):
    """The request ended normally."""

    reason: DoneReason
    metrics: Metrics


class Failed(msgspec.Struct, frozen=True):
    """The request ended with an error of its own; the engine continues."""

    text: str


Event = Refused | Started | Text | Scored | Finished | Failed


class EventStream:
    """The events of one request, on the event loop's side. Owner: the event loop; one reader; lives as long as it."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._follow: Callable[[list[Event]], None] | None = None

    def put(self, event: Event) -> None:
        """Appends an event; runs on the event loop. Call `flush` after the last of several."""
        self._events.append(event)

    def flush(self) -> None:
        """Hands the events to the reader."""
        if self._follow is None:
            self._arrived.set()
        elif self._events:
            events, self._events = self._events, []
            self._follow(events)

    async def batch(self) -> list[Event]:
        """Returns all events since the last call; waits for the first."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events

    def follow(self, read: Callable[[list[Event]], None]) -> None:
        """Calls `read`, which must not raise, with the events so far, and from now on with events as they arrive.

        A reader that waits in `batch` costs a future, a step of its task and a round of the event loop each time.
        """
        self._follow = read
        self.flush()


class Outbox:
    """Carries events from the engine thread to the event loop, with one wake-up for the events of a slice, or of
    several slices if the event loop is late.

    Owner: the engine thread, which alone calls `put` and `send`.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, wake: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        """`wake` makes the event loop call a function, from this thread; by default `call_soon_threadsafe`."""
        self._loop = loop
        self._wake = wake or loop.call_soon_threadsafe
        self._pending: list[tuple[EventStream, Event]] = []
        self._sent: deque[list[tuple[EventStream, Event]]] = deque()
        self._woken = False  # the event loop has yet to deliver; it looks for more before it ends

    def put(self, stream: EventStream, event: Event) -> None:
        """Keeps an event for the next `send`."""
        self._pending.append((stream, event))

    def send(self) -> None:
        """Hands over the events since the last call. Called at least once a slice."""
        if self._pending:
            self._sent.append(self._pending)
            self._pending = []
            if not self._woken:
                self._woken = True
                self._wake(self._deliver)

    def _deliver(self) -> None:
        """Runs on the event loop. Flushes each stream once, whatever was sent meanwhile."""
        streams: dict[EventStream, None] = {}
        while self._sent:
            for stream, event in self._sent.popleft():
                stream.put(event)
                streams[stream] = None
        for stream in streams:
            stream.flush()
        self._woken = False
        if self._sent:  # sent during the flush, without a wake-up; other tasks of the loop run first
            self._woken = True
            self._loop.call_soon(self._deliver)


_BYTE = b"\0"
_MANY = 4096

_write = ctypes.PyDLL(None).write  # keeps the GIL, unlike all functions of Python that write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Wakeup:
    """Wakes the event loop from the engine thread, and keeps the GIL meanwhile.

    `call_soon_threadsafe` releases it while it writes. Then the event loop wakes, takes the GIL, and keeps it until all
    lines are written, while the engine waits and the device is idle. Here the event loop gets the GIL a little later,
    when the engine has dispatched the next forward and waits for MLX.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Made on the event loop."""
        self._loop = loop
        self._call: Callable[[], None] = lambda: None
        self._inside, self._outside = socket.socketpair()
        for end in (self._inside, self._outside):
            end.setblocking(False)
        self._number = self._outside.fileno()
        loop.add_reader(self._inside, self._answer)

    def wake(self, call: Callable[[], None]) -> None:
        """Makes the event loop call this soon. Called from another thread, and not again before that call."""
        self._call = call
        if _write(self._number, _BYTE, 1) != 1:
            self._loop.call_soon_threadsafe(call)

    def _answer(self) -> None:
        self._inside.recv(_MANY)
        self._call()
