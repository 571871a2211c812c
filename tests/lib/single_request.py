"""One request without an engine: prefilled and decoded slice by slice, on the test's own cache.

alone = SingleRequest(request, forward, cache, tokenizer)
text, end = alone.answer()
"""

from collections.abc import Iterator
from time import perf_counter_ns

from runner.cache.interface import Cache
from runner.cache.session import LiveSession
from runner.engine.batch import Batch
from runner.engine.events import Event, Finished, Text
from runner.engine.generation import Forward, Generation
from runner.engine.request import Request
from runner.tokenizer import Tokenizer

CONTEXT = 4096


class SingleRequest:
    """A generation and, once it decodes, its batch."""

    def __init__(
        self, request: Request, forward: Forward, cache: Cache, tokenizer: Tokenizer, chunk: int = 2048
    ) -> None:
        """Opens the session."""
        session = cache.begin(request.prompt)
        assert isinstance(session, LiveSession)
        self.session = session
        self.generation = Generation(request, session, tokenizer, CONTEXT, perf_counter_ns())
        self._batch: Batch | None = None
        self._forward = forward
        self._chunk = chunk

    @property
    def prefilling(self) -> bool:
        return self._batch is None

    def advance(self) -> list[Event]:
        """Computes one slice. If a forward raises, closes the session as failed, then raises the same."""
        try:
            if self.generation.left:
                self.generation.prefill(self._chunk, self._forward)
                return []
            self._batch = self._batch or Batch(self.generation, self._forward)
            return self._batch.take(self._batch.step())[0][1]
        except Exception as error:
            self.generation.fail(error)
            self.generation.close()
            raise

    def slices(self) -> Iterator[list[Event]]:
        """Yields the events of each slice up to the end."""
        while not self.generation.done:
            yield self.advance()

    def answer(self) -> tuple[str, Finished]:
        """Computes all of it; returns its text and the last event."""
        events = [event for events in self.slices() for event in events]
        self.generation.close()
        end = events[-1]
        assert isinstance(end, Finished)
        return "".join(event.text for event in events if isinstance(event, Text)), end
