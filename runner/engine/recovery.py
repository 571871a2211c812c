"""Recovers when memory runs out, or when a cache can no longer be trusted."""

import gc
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from runner.cache import PrefixCache
from runner.engine.events import Event
from runner.engine.generation import Generation, Results
from runner.engine.memory import MemoryBudget
from runner.logs import Log, lacks_memory

if TYPE_CHECKING:
    from runner.engine.ports import Ranks

log = Log(__name__)


class Recovery:
    """Restarts, once each, the requests whose slice found no memory, when all unused memory has been freed.

    A request does not resume where the slice began: a forward that raised leaves its layers in an unknown state. It
    takes from the cache what is kept of its prompt, and computes the rest again, including the answer so far. Owner:
    the engine thread.
    """

    def __init__(self, memory: MemoryBudget, salt: str, ranks: "Ranks | None" = None) -> None:
        """With `ranks` nothing is recovered: an error that strikes one of them may not strike the others."""
        self._memory = memory
        self._ranks = ranks
        self._salt = salt
        self._retrying: list[Generation] = []
        self.needed = False
        """True if memory ran out. Call `free_and_restart` when the error, and all that it holds, is gone."""

    def note(self, error: Exception) -> None:
        """Notes an error; the requests that it struck continue by themselves. Ends all ranks, if there are several."""
        if self._ranks is not None:
            self._ranks.fail(error)
        self.needed |= lacks_memory(error)

    def retry_or_fail(self, generation: Generation, error: Exception) -> Results:
        """Handles an error in a slice of one request: ends the request or, if memory ran out for the first time, lets
        it restart later."""
        self.note(error)
        if not lacks_memory(error) or generation.restarted:
            return [(generation, generation.fail(error))]
        self._retrying.append(generation)
        return []

    def free_and_restart(self, cache: PrefixCache) -> Results:
        """Frees all unused memory, and restarts the requests that failed. Those of the results that are not done go
        on."""
        retrying, self._retrying, self.needed = self._retrying, [], False
        log.warning("memory ran out; freeing unused cache entries", requests_restarted=len(retrying))
        results = [(generation, _events(generation, self._close)) for generation in retrying]
        try:
            self._memory.free(cache)
        except Exception:
            log.exception("some of the unused memory cannot be freed")
        return [
            (generation, events or _events(generation, partial(self._restart, cache))) for generation, events in results
        ]

    def _close(self, generation: Generation) -> None:
        generation.session.close()

    def _restart(self, cache: PrefixCache, generation: Generation) -> None:
        generation.restart(cache.begin(generation.request.keys, self._salt))


def _events(generation: Generation, action: Callable[[Generation], None]) -> list[Event]:
    """Acts on a request; returns the events of its end if that raises."""
    try:
        action(generation)
    except Exception as error:
        return generation.fail(error)
    return []


def discard(cache: PrefixCache) -> None:
    """Frees what can be freed of an invalid cache. Drop the last reference to it, then call `collect_garbage`."""
    log.warning("the cache is dropped", why="a session in it could not be opened or closed")
    try:
        cache.detach()
    except Exception:
        log.exception("a part of the cache cannot be freed")


def collect_garbage() -> None:
    """Frees everything that is no longer referred to."""
    gc.unfreeze()  # the first cache was made before the process froze its objects
    gc.collect()  # the parts of the old cache refer to each other, and to gigabytes
    mx.clear_cache()
