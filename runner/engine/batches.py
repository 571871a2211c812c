"""The batches that decode: adds requests to them, joins them, and takes requests out."""

from collections.abc import Sequence

from runner.cache import CacheBudget
from runner.engine.batch import Batch
from runner.engine.batch_matching import BatchMatcher
from runner.engine.context import EngineContext
from runner.engine.generation import Generation
from runner.engine.recovery import Recovery
from runner.engine.results import Results
from runner.logs import Log

log = Log(__name__)


class Batches:
    """All batches of an engine. Owner: the engine thread.

    If a change of a batch of several requests raises, the batch is broken up: each of them goes on alone, from what its
    own layers have seen. The methods that may do so return these requests, with events for their clients.
    """

    def __init__(self, matcher: BatchMatcher, recovery: Recovery) -> None:
        self.all: list[Batch] = []
        self._matcher = matcher
        self._recovery = recovery

    @property
    def generations(self) -> list[Generation]:
        """The requests that decode."""
        return [generation for batch in self.all for generation in batch.generations]

    @property
    def nbytes(self) -> int:
        """The bytes that batches hold beside the layers of their requests."""
        return sum(batch.nbytes for batch in self.all)

    def start(self, generation: Generation, context: EngineContext, cache: CacheBudget) -> Results:
        """Starts a batch of one request, which has been prefilled. It is not drafted where memory is short. Returns the
        request if that failed."""
        try:
            if generation.drafter is not None and not context.memory.allows_drafts(cache):
                generation.drafter = None
            batch = Batch(generation, context.memory.measured(context.forward_of(generation.request)))
        except Exception as error:
            return self._recovery.retry_or_fail(generation, error)
        batch.steps = int(generation.life.known > 0)  # it goes on as if it had drawn what was known
        self.all.append(batch)
        return []

    def join(self, batch: Batch, cache: CacheBudget) -> tuple[Batch, Results]:
        """Joins a batch of one request with the one that suits it best, if any. Returns the batch that the request is
        in now, and the requests of a batch that was broken up."""
        target = self._matcher.find(batch, self.all, cache)
        if target is None:
            return batch, []
        try:
            target.join(batch)
        except Exception as error:
            batch.generations[0].may_batch = False
            if len(target.generations) > 1:
                return batch, self.end(target, error)
            log.exception("two answers could not be joined; computing them in turns")
            return batch, []
        self.all.remove(batch)
        return target, []

    def leave(self, batch: Batch, leaving: Sequence[Generation]) -> Results:
        """Takes requests out of their batch, and ends the batch when none is left. Returns the others if it had to be
        broken up."""
        try:
            batch.leave(leaving)
        except Exception as error:
            self.all.remove(batch)
            batch.generations = [generation for generation in batch.generations if generation not in leaving]
            return self._break_up(batch, error)
        if not batch.generations:
            self.all.remove(batch)
        return []

    def add_split_off(self, batch: Batch) -> None:
        """Adds the batches of one that were split off from this one because of slow grammars."""
        self.all += batch.split_off
        batch.split_off = []

    def end(self, batch: Batch, error: Exception) -> Results:
        """Ends a batch after an error, and returns its requests. One that was alone restarts or has failed."""
        self.all.remove(batch)
        if len(batch.generations) > 1:
            return self._break_up(batch, error)
        return self._recovery.retry_or_fail(batch.generations[0], error)

    def _break_up(self, batch: Batch, error: Exception) -> Results:
        log.exception("a batch failed; computing its answers one by one", answers=len(batch.generations))
        self._recovery.note(error)
        return batch.break_up(error)
