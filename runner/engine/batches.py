"""The batches of an engine: starts them, joins them, and removes requests from them."""

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
"""The most steps that an answer decodes alone before it joins others. Joining copies the whole row of an answer, which
does not pay off for a long prompt with a short answer."""
_COPIED_TOKENS = 512
"""A row decodes one step alone for each 512 tokens that it holds, up to the limit of lone steps."""


class Batches:
    """All batches of an engine. Owner: the engine thread.

    If a change of a batch of several requests raises, the batch is broken up: each request continues alone, from the
    state of its own layers. A method that may break up a batch returns the requests of that batch, each with the events
    for its client.
    """

    def __init__(self, parts: CoreParts, recovery: Recovery) -> None:
        self.all: list[Batch] = []
        self.lone_steps = LONE_STEPS
        """The most steps that a batch decodes alone before it may join another one."""
        self._parts = parts
        self._recovery = recovery
        self._said_why_not = False

    @property
    def generations(self) -> list[Generation]:
        """The requests in all batches."""
        return [generation for batch in self.all for generation in batch.generations]

    @property
    def joining(self) -> list[int]:
        """The ids of the batches that have one answer and can be joined with others."""
        if self._parts.unbatchable:
            return []
        alone = [each for each in self.all if len(each.generations) == 1]
        return [each.id for each in alone if each.generations[0].may_batch and each.batchable]

    @property
    def nbytes(self) -> int:
        """The bytes that all batches hold beside their requests' own layers."""
        return sum(batch.nbytes for batch in self.all)

    def start(self, generation: Generation, cache: PrefixCache) -> Results:
        """Starts a batch of one prefilled request. Switches off the request's drafts if memory is short. Returns the
        request if the start failed, else an empty list."""
        try:
            if generation.drafter is not None and not self._parts.memory.allows_drafts(cache):
                generation.drafter = None
            steps = generation.life.known  # a known first token counts as a step
            batch = Batch(generation, self._parts, steps)
        except Exception as error:
            return self._recovery.retry_or_fail(generation, error)
        self.all.append(batch)
        return []

    def may_draft(self, cache: PrefixCache) -> bool:
        """Returns True unless a batch waits to join another one. Both must first make a step without drafts."""
        return all(self._target_of(each, cache) is None for each in self.all if len(each.generations) == 1)

    def make_room(self, batch: Batch, coming: Sequence[Generation], cache: PrefixCache) -> None:
        """Makes a piece of the room that a batch of several requests needs for its next tokens, and for those of the
        `coming` requests that may join it."""
        lengths = [each.session.total for each in coming if each.may_batch and not self._parts.unbatchable]
        if lengths and not (batch.accepts(lengths) and _has_memory(cache, batch, lengths)):
            lengths = []
        batch.make_room(lengths)

    def join(self, batch: Batch, cache: PrefixCache) -> tuple[Batch, Results]:
        """Joins each batch of one request, `batch` first, with the batch that suits it best, once that target has made
        room. Batches with the same target join together. Returns the batch that now holds the request of `batch`, and
        the requests of a batch that was broken up."""
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
        """Returns the batch that `batch`, of one request, should join; None if there is none or memory has no room.
        `joining` maps a target to the batches that will join it first."""
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
        """Removes the `leaving` requests from `batch`, and ends the batch if no request remains. If the batch had to be
        broken up, returns the remaining requests."""
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
        """Adds the batches of one request that were split off from `batch` because of slow grammars."""
        self.all += batch.split_off
        batch.split_off = []

    def end(self, batch: Batch, error: Exception) -> Results:
        """Ends a batch after an error, and returns its requests. A request that was alone restarts or has failed."""
        self.all.remove(batch)
        if len(batch.generations) > 1:
            return self._recovery.break_up(batch, error)
        batch.generations[0].note_forward(error)
        return self._recovery.retry_or_fail(batch.generations[0], error)


def _has_memory(cache: PrefixCache, batch: Batch, lengths: Sequence[int]) -> bool:
    """Returns True if there is memory for `batch` after rows of these lengths have joined it."""
    rows = [*batch.lengths, *lengths]
    return cache.allows(cache.session_bytes(max(rows)) * len(rows) - batch.nbytes)
