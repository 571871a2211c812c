"""The batches that decode: adds requests to them, joins them, and takes requests out."""

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from runner.cache import PrefixCache
from runner.engine.batch import Batch
from runner.engine.core import CoreParts
from runner.engine.generation import Generation, Results
from runner.engine.recovery import Recovery
from runner.logs import Log

log = Log(__name__)

LONE_STEPS = 4
"""The most steps of an answer before it joins others. Joining copies all that a row holds, which does not pay for long
prompts with short answers."""
_COPIED_TOKENS = 512
"""A row takes one step alone for each of these tokens that it holds."""


class Batches:
    """All batches of an engine. Owner: the engine thread.

    If a change of a batch of several requests raises, the batch is broken up: each request goes on alone, from the
    state of its own layers. The methods that may break one up return its requests, with events for their clients.
    """

    def __init__(self, parts: CoreParts, recovery: Recovery) -> None:
        self.all: list[Batch] = []
        self.lone_steps = LONE_STEPS
        """The most steps that a batch takes alone before it may join another one."""
        self._parts = parts
        self._recovery = recovery
        self._said_why_not = False

    @property
    def generations(self) -> list[Generation]:
        """The requests that decode."""
        return [generation for batch in self.all for generation in batch.generations]

    @property
    def joining(self) -> list[int]:
        """The ids of the batches of one answer that can be computed with others."""
        if self._parts.unbatchable:
            return []
        alone = [each for each in self.all if len(each.generations) == 1]
        return [each.id for each in alone if each.generations[0].may_batch and each.batchable]

    @property
    def nbytes(self) -> int:
        """The bytes that batches hold beside the layers of their requests."""
        return sum(batch.nbytes for batch in self.all)

    def start(self, generation: Generation, cache: PrefixCache) -> Results:
        """Starts a batch of one request, which has been prefilled. It is not drafted where memory is short. Returns the
        request if that failed."""
        try:
            if generation.drafter is not None and not self._parts.memory.allows_drafts(cache):
                generation.drafter = None
            steps = generation.life.known  # it goes on as if it had drawn a known first token
            batch = Batch(generation, self._parts, steps)
        except Exception as error:
            return self._recovery.retry_or_fail(generation, error)
        self.all.append(batch)
        return []

    def may_draft(self, cache: PrefixCache) -> bool:
        """Returns True unless a batch waits to join another one: both have to make a step without drafts before."""
        return all(self._target_of(each, cache) is None for each in self.all if len(each.generations) == 1)

    def make_room(self, batch: Batch, coming: Sequence[Generation], cache: PrefixCache) -> None:
        """Lets a batch of several requests make a piece of the room for its next tokens, and for the `coming` requests
        that may join it."""
        lengths = [each.session.total for each in coming if each.may_batch and not self._parts.unbatchable]
        if lengths and not (batch.accepts(lengths) and _has_memory(cache, batch, lengths)):
            lengths = []
        batch.make_room(lengths)

    def join(self, batch: Batch, cache: PrefixCache) -> tuple[Batch, Results]:
        """Joins each batch of one request, this one first, with the batch that suits it best, if any, once that has
        made room. Batches with the same target join at once. Returns the batch that the request is in now, and the
        requests of a batch that was broken up."""
        joining: dict[Batch, list[Batch]] = {}
        for each in [batch, *(other for other in self.all if other is not batch and len(other.generations) == 1)]:
            target = None if each in joining else self._target_of(each, cache, joining)
            if target is not None and all(map(each.may_meet, (target, *joining.get(target, ())))):
                joining.setdefault(target, []).append(each)
        for target, others in joining.items():
            try:
                if not target.make_room([length for each in others for length in each.lengths]):
                    continue
                target.join(others)
            except Exception as error:
                for each in others:
                    each.generations[0].may_batch = False
                if len(target.generations) > 1:
                    return others[0], self.end(target, error)
                log.exception("answers could not be joined; computing them in turns")
            else:
                self.all = [each for each in self.all if each not in others]
                batch = target if batch in others else batch
        return batch, []

    def _target_of(
        self, batch: Batch, cache: PrefixCache, joining: Mapping[Batch, Sequence[Batch]] = MappingProxyType({})
    ) -> Batch | None:
        """Returns the batch that this batch of one request should join, if memory has room for it. `joining` maps a
        batch to the batches that join it first."""
        if (
            len(batch.generations) > 1
            or len(self.all) < 2
            or batch.steps < min(self.lone_steps, batch.lengths[0] // _COPIED_TOKENS)
            or not batch.generations[0].may_batch
        ):
            return None
        gone = {batch, *chain(*joining.values())}
        lengths = {
            each: [length for other in (*joining.get(each, ()), batch) for length in other.lengths]
            for each in self.all
            if each not in gone
        }
        targets = [each for each, coming in lengths.items() if each.accepts(coming)]
        if not targets:
            return None
        if self._parts.unbatchable:
            if not self._said_why_not:
                log.info("answers are computed in turns, not together", why=self._parts.unbatchable)
            self._said_why_not = True
            return None
        if not batch.batchable:
            return None
        target = max(targets, key=lambda each: len(each.generations) + len(lengths[each]))
        return target if _has_memory(cache, target, lengths[target]) else None

    def leave(self, batch: Batch, leaving: Sequence[Generation]) -> Results:
        """Removes requests from their batch, and ends the batch when none is left. Returns the other requests if it had
        to be broken up."""
        try:
            batch.leave(leaving)
        except Exception as error:
            self.all.remove(batch)
            batch.generations = [generation for generation in batch.generations if generation not in leaving]
            return self._recovery.break_up(batch, error)
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
            return self._recovery.break_up(batch, error)
        batch.generations[0].note_forward(error)
        return self._recovery.retry_or_fail(batch.generations[0], error)


def _has_memory(cache: PrefixCache, batch: Batch, lengths: Sequence[int]) -> bool:
    """Returns True if there is memory for a batch after rows of these lengths have joined it."""
    rows = [*batch.lengths, *lengths]
    return cache.allows(cache.session_bytes(max(rows)) * len(rows) - batch.nbytes)
