"""What is done where memory, or trust in what is kept, has run out."""

import gc
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from runner.cache import Cache
from runner.cache.session import LiveSession
from runner.engine.batch import Results
from runner.engine.events import Event
from runner.engine.generation import Generation
from runner.engine.memory.budget import MemoryBudget
from runner.logs import Log, lacks_memory

log = Log(__name__)


class Recovery:
    """Those whose slice found no memory: each begins again once, when everything that nobody uses is gone.

    Not from where the slice began: a forward that broke off leaves its layers in a state that nobody knows. What is
    kept of the prompt is taken from the cache, the rest is computed once more, the answer so far included. Owner: the
    engine thread.
    """

    def __init__(self, memory: MemoryBudget, salt: str) -> None:
        self._memory = memory
        self._salt = salt
        self._starved: list[Generation] = []
        self.pending = False
        """True if there is something to do, once the error and all that it holds are gone."""

    def heed(self, error: Exception) -> None:
        """This has been raised; those whom it struck go on by themselves."""
        self.pending |= lacks_memory(error)

    def struck(self, generation: Generation, error: Exception) -> Results:
        """A slice of this one alone has raised: it ends, or, where memory was lacking, begins again once, later."""
        self.heed(error)
        if not lacks_memory(error) or generation.began_again:
            return [(generation, generation.fail(error))]
        self._starved.append(generation)
        return []

    def again(self, cache: Cache) -> Results:
        """Frees what can be, and lets them begin again. Those of the results that are not done go on."""
        starved, self._starved, self.pending = self._starved, [], False
        log.warning("memory ran out: what nobody uses is freed", requests_that_begin_again=len(starved))
        results = [(generation, _events(generation, self._leave)) for generation in starved]
        try:
            self._memory.free(cache)
        except Exception:
            log.exception("not all could be freed")
        return [
            (generation, events or _events(generation, partial(self._begin, cache))) for generation, events in results
        ]

    def _leave(self, generation: Generation) -> None:
        generation.session.close(failed=True)

    def _begin(self, cache: Cache, generation: Generation) -> None:
        session = cache.begin(generation.request.prompt, self._salt)
        assert isinstance(session, LiveSession)
        generation.begin_again(session)


def _events(generation: Generation, do: Callable[[Generation], None]) -> list[Event]:
    """Does it; what there is to tell if it raises, by which this request ends."""
    try:
        do(generation)
    except Exception as error:
        return generation.fail(error)
    return []


def give_up(cache: Cache) -> None:
    """Frees what it can of a cache in which a session could not be opened or closed. Let go of it, then `collect`."""
    log.warning("the cache is dropped", why="a session in it could not be opened or closed")
    try:
        cache.detach()
    except Exception:
        log.exception("a part of the cache cannot be freed")


def collect() -> None:
    """Frees what nothing refers to any more."""
    gc.unfreeze()  # the first cache was made before the process froze what it had
    gc.collect()  # the pieces of the old one hold each other, and gigabytes
    mx.clear_cache()
