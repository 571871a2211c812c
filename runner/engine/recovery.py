"""Recovers after memory has run out, or after a cache has become invalid."""

import gc
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from runner.cache import PrefixCache
from runner.engine.batch import GRAMMAR_WAIT_S, Batch
from runner.engine.core import CoreParts
from runner.engine.events import Event
from runner.engine.generation import Generation, Results
from runner.logs import Log, lacks_memory
from runner.sampling.sample import SampledTokens

log = Log(__name__)


class Recovery:
    """Frees all unused memory, then restarts the requests whose slice found no memory, each of them once.

    A request does not resume where the slice began, because a forward that raised leaves its layers in an unknown
    state. It reuses the part of the prompt that the cache has, and computes the rest again, including the answer so
    far. An answer of a failed batch continues from its own layers, which the batch did not change. Owner: the engine
    thread.
    """

    def __init__(self, parts: CoreParts) -> None:
        """With several ranks there is no recovery, because an error in one rank may be missing in another."""
        self._parts = parts
        self._retrying: list[Generation] = []
        self.needed = False
        """True if memory ran out. Call `free_and_restart` when the error and all objects that it holds are freed."""

    def note(self, error: Exception) -> None:
        """Notes an error of requests that continue in another way. With several ranks, ends all ranks."""
        if self._parts.ranks is not None:
            self._parts.ranks.fail(error)
        self.needed |= lacks_memory(error)

    def retry_or_fail(self, generation: Generation, error: Exception) -> Results:
        """Handles an error in a slice of one request: ends the request or, after a first lack of memory, restarts it
        later."""
        self.note(error)
        if not lacks_memory(error) or generation.restarted:
            return [(generation, generation.fail(error))]
        self._retrying.append(generation)
        return []

    def break_up(self, batch: Batch, error: Exception) -> Results:
        """Breaks up a batch after `error`. Each answer returns to the state of its own layers, and takes the token that
        it drew on them, unless it has taken it. An answer whose own layers are lost fails."""
        log.exception("a batch failed; computing its answers one by one", answers=len(batch.generations))
        self.note(error)
        own = batch.own
        return batch.lost + [(each, _fall_back(each, own.get(each), error)) for each in batch.generations]

    def free_and_restart(self, cache: PrefixCache) -> Results:
        """Frees all unused memory, and restarts the requests that found none. Returns these requests; the ones not done
        continue."""
        retrying, self._retrying, self.needed = self._retrying, [], False
        log.warning("memory ran out; freeing unused cache entries", requests_restarted=len(retrying))
        results = [(generation, _events(generation, self._close)) for generation in retrying]
        try:
            self._parts.memory.free(cache)
        except Exception:
            log.exception("some of the unused memory cannot be freed")
        return [
            (generation, events or _events(generation, partial(self._restart, cache))) for generation, events in results
        ]

    def _close(self, generation: Generation) -> None:
        generation.session.close()

    def _restart(self, cache: PrefixCache, generation: Generation) -> None:
        generation.restart(cache.begin(generation.request.keys, self._parts.salt))


def _events(generation: Generation, action: Callable[[Generation], None]) -> list[Event]:
    """Calls `action` on a request. If that raises, returns the events of the request's end."""
    try:
        action(generation)
    except Exception as error:
        return generation.fail(error)
    return []


def _fall_back(generation: Generation, own: SampledTokens | None, error: Exception) -> list[Event]:
    """Returns an answer to the state of its own layers, to decode alone. Fails the answer if these layers are lost.
    `own` is the token that the answer drew on them and has not taken; it is taken now. Returns the events for the
    client."""
    # Without a token to take, one recorded token must be left that the layers have not seen.
    seen_all = own is None and generation.session.position >= len(generation.session.recorded)
    if generation.session.failed or seen_all:
        return generation.fail(error)
    events: list[Event] = []
    try:
        if own:
            generation.restart_grammar()
            generation.grammar.follow(choice := own.read()[0])
            if generation.grammar.wait(GRAMMAR_WAIT_S):
                events += generation.take(generation.with_forced(choice, alone=False))
            else:
                events += generation.abort("its grammar takes too long to be followed again")
        if not generation.done:
            generation.return_to_prefill()
    except Exception as fault:
        generation.note_forward(fault)
        events += generation.fail(fault)
    return events


def discard(cache: PrefixCache) -> None:
    """Frees as much of an invalid cache as possible. Drop the last reference to it, then call `collect_garbage`."""
    log.warning("the cache is dropped", why="a session in it could not be opened or closed")
    try:
        cache.detach()
    except Exception:
        log.exception("a part of the cache cannot be freed")


def collect_garbage() -> None:
    """Frees all objects that nothing refers to, and MLX's buffers for reuse."""
    gc.unfreeze()  # the first cache is among the frozen objects, which a collection skips
    gc.collect()  # only a collection frees the old cache, whose parts refer to each other
    mx.clear_cache()
