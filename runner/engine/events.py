"""What the engine tells the event loop about one request: Refused; or Started, Text..., then Finished or Failed."""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from protocol import DoneReason, Logprob, Metrics


class Refused(msgspec.Struct, frozen=True):
    """The request cannot be computed, for a reason of its own that is told before anything is begun."""

    text: str


class Started(msgspec.Struct, frozen=True):
    """The request has left the queue."""


class Text(msgspec.Struct, frozen=True):
    """Text to deliver, the entries of the tokens that end in it, and the counters so far where they are wanted."""

    text: str
    logprobs: list[Logprob]
    metrics: Metrics | None


class Finished(msgspec.Struct, frozen=True):
    """The request ended as it should."""

    reason: DoneReason
    metrics: Metrics


class Failed(msgspec.Struct, frozen=True):
    """The request ended by a fault of its own; the engine goes on."""

    text: str


Event = Refused | Started | Text | Finished | Failed


class EventStream:
    """The events of one request, on the event loop's side. Owner: the event loop; one reader; lives as long as it."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._follow: Callable[[list[Event]], None] | None = None

    def put(self, event: Event) -> None:
        """Append an event; runs on the event loop. Whoever puts some calls `flush` after the last."""
        self._events.append(event)

    def flush(self) -> None:
        """Hand what was put to the reader."""
        if self._follow is None:
            self._arrived.set()
        elif self._events:
            events, self._events = self._events, []
            self._follow(events)

    async def batch(self) -> list[Event]:
        """Everything that arrived since the last call, at least one event; waits for it."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events

    def follow(self, read: Callable[[list[Event]], None]) -> None:
        """From here on `read`, which must not raise, is called with what arrives, and first with what has arrived.

        A reader that waits in `batch` costs a future, a step of its task and a round of the event loop each time.
        """
        self._follow = read
        self.flush()


class Outbox:
    """Carries events from the engine thread to the event loop: those of a slice with one wake-up, and those of several
    slices where the event loop is behind.

    Owner: the engine thread, which alone calls `put` and `send`.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, wake: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        """`wake` has the event loop call something, from this thread."""
        self._loop = loop
        self._wake = wake or loop.call_soon_threadsafe
        self._pending: list[tuple[EventStream, Event]] = []
        self._sent: deque[list[tuple[EventStream, Event]]] = deque()
        self._woken = False  # the event loop has still to come, or is not done; it looks again before it leaves

    def put(self, stream: EventStream, event: Event) -> None:
        """Keep an event for the next `send`."""
        self._pending.append((stream, event))

    def send(self) -> None:
        """Hand over what was put since the last call. Called at least once a slice."""
        if self._pending:
            self._sent.append(self._pending)
            self._pending = []
            if not self._woken:
                self._woken = True
                self._wake(self._deliver)

    def _deliver(self) -> None:
        """On the event loop: each stream is flushed once, whatever was sent meanwhile."""
        streams: dict[EventStream, None] = {}
        while self._sent:
            for stream, event in self._sent.popleft():
                stream.put(event)
                streams[stream] = None
        for stream in streams:
            stream.flush()
        self._woken = False
        if self._sent:  # while it wrote, when nobody woke it; others of the event loop have their turn first
            self._woken = True
            self._loop.call_soon(self._deliver)
