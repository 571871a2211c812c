"""The requests whose prompts have come to a picture, which is encoded piece by piece."""

from typing import NamedTuple

from runner.cache import Cache
from runner.engine.generation import Generation
from runner.engine.memory.budget import MemoryBudget
from runner.engine.observe.trace import TRACE
from runner.engine.recovery import Recovery
from runner.engine.results import Results


class Encoded(NamedTuple):
    """A request that has left the line: its picture is encoded, or it has failed or restarts later."""

    generation: Generation
    results: Results
    goes_on: bool


class Encodings:
    """Encodes one picture at a time, that of the oldest request whose pixels are there. Owner: the engine thread."""

    def __init__(self, memory: MemoryBudget, recovery: Recovery) -> None:
        self.generations: list[Generation] = []
        self._memory, self._recovery = memory, recovery

    @property
    def ready(self) -> list[Generation]:
        """The requests whose pictures can be encoded now, the oldest first."""
        return [each for each in self.generations if each.pictures is not None and each.pictures.ready]

    def advance(self, cache: Cache) -> Encoded | None:
        """Computes one piece of a picture. Returns the request that goes on elsewhere; None if there is more to do."""
        generation = self.ready[0]
        pictures = generation.pictures
        assert pictures is not None
        TRACE.name("encode", request=generation.request.number)
        results: Results = []
        goes_on = False
        try:
            if text := self._memory.make_room(cache, pictures.needed_bytes):
                results = [(generation, generation.abort(text))]
            elif pictures.advance():
                goes_on = True
            else:
                return None
        except Exception as error:  # this request restarts or ends, the engine goes on
            results = self._recovery.retry_or_fail(generation, error)
        self.generations.remove(generation)
        return Encoded(generation, results, goes_on)
