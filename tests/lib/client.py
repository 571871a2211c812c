"""A client of a scheduler in a test: it has its events as soon as the engine sends them."""

from protocol import Logprob
from runner.cache.session import LiveSession
from runner.engine.events import Event, EventStream, Finished, Text
from runner.engine.request import Request


class EngineClient(EventStream):
    """A request, and the events that its client receives."""

    request: Request

    def __init__(self) -> None:
        super().__init__()
        self.session: LiveSession | None = None
        """Set once the request has one."""

    @property
    def received(self) -> list[Event]:
        """All events so far."""
        return self._events

    @property
    def tokens(self) -> list[int]:
        """The sampled tokens, the end-of-sequence token included."""
        return [] if self.session is None else self.session.recorded[self.session.total :]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.received if isinstance(event, Text))

    @property
    def entries(self) -> list[Logprob]:
        return [entry for event in self.received if isinstance(event, Text) for entry in event.logprobs]

    @property
    def finished(self) -> Finished | None:
        end = self.received[-1] if self.received else None
        return end if isinstance(end, Finished) else None
