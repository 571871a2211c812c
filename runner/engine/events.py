"""What the engine tells the event loop about one request: Refused; or Started, Text..., then Finished or Failed."""

import asyncio

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

    def put(self, event: Event) -> None:
        """Append an event; runs on the event loop."""
        self._events.append(event)
        self._arrived.set()

    async def batch(self) -> list[Event]:
        """Everything that arrived since the last call, at least one event; waits for it."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events


class Outbox:
    """Carries events from the engine thread to the event loop: any number of them with one wake-up.

    Owner: the engine thread, which alone calls `put` and `send`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: list[tuple[EventStream, Event]] = []

    def put(self, stream: EventStream, event: Event) -> None:
        """Keep an event for the next `send`."""
        self._pending.append((stream, event))

    def send(self) -> None:
        """Hand over what was put since the last call. Called at least once a slice."""
        if self._pending:
            batch, self._pending = self._pending, []
            self._loop.call_soon_threadsafe(_deliver, batch)


def _deliver(batch: list[tuple[EventStream, Event]]) -> None:
    for stream, event in batch:
        stream.put(event)
