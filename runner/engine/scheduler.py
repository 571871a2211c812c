"""The requests from their arrival to their end, one slice at a time."""

from collections.abc import Sequence
from time import perf_counter, perf_counter_ns

from runner.cache.session import LiveSession
from runner.engine.batch import Batch, Results, tell
from runner.engine.batch_matching import BatchMatcher
from runner.engine.context import EngineContext, SettledTrial
from runner.engine.events import Failed, Outbox, Refused, Started
from runner.engine.generation import Generation
from runner.engine.observe.journal import Journal
from runner.engine.policy import Begin, Decode, Prefill, Slice, SlicePolicy, Try, View
from runner.engine.queue import RequestQueue
from runner.engine.recovery import Recovery, collect, give_up
from runner.engine.request import Request
from runner.engine.trace import TRACE
from runner.logs import Log, told

log = Log(__name__)
_RESERVE_SLICES = 64  # how often the bytes of batches, which grow, are told to the cache


class Scheduler:
    """Advances requests slice by slice. Owner: the engine thread.

    A request that has begun is in one place at a time: behind another one that computes what they share, prefilling, or
    in a group. Whatever goes wrong with one ends that one, and leaves the others as they are.
    """

    def __init__(self, means: EngineContext, schedule: SlicePolicy, parallel: int, outbox: Outbox) -> None:
        """At most `parallel` requests run at once."""
        self.cache = means.make_cache()
        self._means, self._schedule, self._outbox = means, schedule, outbox
        self.places = parallel if self.cache.concurrent else 1
        """How many requests may run at once."""
        self._waiting = RequestQueue(means.salt, self.places)
        self.journal = Journal(self._waiting)
        self.prefilling: list[Generation] = []  # their prompts are being read
        self._compiling: list[Generation] = []  # prefilled, but their grammar is not known yet
        self._groups: list[Batch] = []
        self.matching = BatchMatcher(means.trial if self.places > 1 else SettledTrial())
        self.memory = means.memory
        self._shortage = Recovery(means.memory, means.salt)
        self._spoiled = False  # the next request must not meet what the last one left behind in the cache
        self._slices = 0
        self._make_room()

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.add(request)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, until something comes in or a grammar is compiled."""
        busy = self.prefilling or any(group.ready for group in self._groups) or self._startable
        return not busy and not any(each.compiled for each in self._compiling)

    @property
    def expectant(self) -> bool:
        """Whether a grammar is being followed for an answer: there will be something to do without a word."""
        return bool(self._groups)

    @property
    def _startable(self) -> Request | None:
        waiting = self._waiting
        some = waiting.queue or waiting.behind
        return waiting.first(self.cache, self.memory, len(self._generations)) if some else None

    @property
    def _generations(self) -> list[Generation]:
        """Those that have begun to be computed."""
        return [*self.prefilling, *self._compiling, *(each for group in self._groups for each in group.generations)]

    def advance(self) -> None:
        """Runs one slice: a beginning, a part of a prompt, or a decode step."""
        started = perf_counter()
        self._drop()
        for generation in [each for each in self._compiling if each.compiled]:
            self._compiling.remove(generation)
            self._place(generation)
        startable, ready = self._startable, [group for group in self._groups if group.ready]
        view = View(
            startable=int(startable is not None),
            prefilling=[generation.left for generation in self.prefilling],
            decoding=[group.id for group in ready],
            trial=self.matching.waits and len(ready) > 1,
        )
        chosen = self._schedule.next(view)
        if TRACE.on:
            TRACE.lap("schedule")
        if chosen is not None:
            done = self._run(chosen, view, startable, ready)
            self._schedule.took(done, view, perf_counter() - started)
            self.journal.counters.sliced(done, perf_counter() - started)
        self._slices += 1
        if self._slices % _RESERVE_SLICES == 0:
            self._reserve()
        if self._shortage.pending:
            results = self._shortage.again(self.cache)
            self._spoiled |= any(generation.done for generation, _ in results)
            self._go_on(results)
        if self._spoiled:
            self._renew_cache()
        if self._unsettled or not isinstance(chosen, Decode):
            self._make_room()

    def _run(self, chosen: Slice, view: View, startable: Request | None, ready: Sequence[Batch]) -> Slice:
        """Returns what it really did."""
        match chosen:
            case Begin() if startable is not None:
                TRACE.name("begin", request=startable.number, tokens=len(startable.prompt))
                self._begin(startable)
                TRACE.lap("resume")
            case Prefill(index, tokens):
                self._waiting.changed = True
                TRACE.name("prefill", request=self.prefilling[index].request.number, tokens=tokens)
                return chosen._replace(tokens=self._prefill(self.prefilling[index], tokens))
            case Decode(index):
                return Decode(view.decoding.index(self._decode(ready[index])))
            case Try():
                self.matching.advance()
        return chosen

    # --- beginning and prefill

    def _begin(self, request: Request) -> None:
        started_ns = self._waiting.take(request)
        if started_ns is None:
            if text := self.memory.refusal(self.cache, len(request.prompt)):
                self._outbox.put(request.stream, Refused(text))
                return self.journal.never_began([request], "refused")
            started_ns = perf_counter_ns()
            self._outbox.put(request.stream, Started())
            if self.cache.follows(request.prompt, self._means.salt):
                return self._waiting.put_behind(request, started_ns)
        try:
            session = self.cache.begin(request.prompt, self._means.salt)
            assert isinstance(session, LiveSession)
            generation = Generation(request, session, self._means.tokenizer, self._means.context_length, started_ns)
        except Exception as error:  # this request ends, the engine goes on
            log.exception("a request failed", request=request.number)
            self._outbox.put(request.stream, Failed(told(error)))
            self.journal.never_began([request], "failed")
            self._spoiled = True
        else:
            self.journal.began(generation)
            self._place(generation)

    def _place(self, generation: Generation) -> None:
        if generation.compiled and not generation.done:
            self._deliver([(generation, generation.constrain())])
        if generation.done:
            return
        if generation.left:
            self.prefilling.append(generation)
        elif generation.compiled:
            self._groups.append(Batch(generation, self.memory.watched(self._means.forward)))
        else:
            self._compiling.append(generation)

    def _prefill(self, generation: Generation, tokens: int) -> int:
        """Returns how many it computed."""
        try:
            computed = self.memory.prefill(self.cache, generation, tokens, self._means.forward)
        except Exception as error:  # this request begins again or ends, the engine goes on
            self.prefilling.remove(generation)
            self._deliver(self._shortage.struck(generation, error))
            return 0
        self.journal.prefilled(generation)
        if not generation.left:
            self.prefilling.remove(generation)
            self._place(generation)
        return computed

    # --- decode

    def _decode(self, group: Batch) -> int:
        """A step of this group or, where it joins another one, of that. Returns the id of the group that stepped."""
        group = (self._join(group) if len(self._groups) > 1 else None) or group
        try:
            choices = group.step()
        except Exception as error:
            if len(group.generations) > 1:
                self._disband(group, error)
            else:  # this request begins again or ends, the engine goes on
                self._groups.remove(group)
                self._deliver(self._shortage.struck(group.generations[0], error))
        else:
            if choices:
                self.memory.stepped()
                done = tell(self._outbox, group.take(choices))
                self.journal.counters.stepped(group.generations, perf_counter())
                if done:
                    self._leave(group, done)
        if group.parted:
            self._groups += group.parted
            group.parted = []
            self._reserve()
        self._waiting.changed |= group.steps <= 1  # the very first forward shows what a request takes
        return group.id

    def _join(self, group: Batch) -> Batch | None:
        """Puts a group of one into another group, if there is one that it goes well with, and returns that."""
        host = self.matching.host(group, self._groups, self.cache)
        if host is None:
            return None
        try:
            host.join(group)
        except Exception as error:
            group.generations[0].sociable = False
            if len(host.generations) > 1:
                self._disband(host, error)
            else:
                log.exception("two answers could not be joined: they are computed in turns")
            return None
        self._groups.remove(group)
        self._reserve()
        return host

    def _leave(self, group: Batch, leaving: Sequence[Generation]) -> None:
        """These end, and the others of the group go on."""
        if not leaving:
            return
        self._outbox.send()  # the rest may take a while
        try:
            group.leave(leaving)
        except Exception as error:
            group.generations = [generation for generation in group.generations if generation not in leaving]
            self._disband(group, error)
        else:
            if not group.generations:
                self._groups.remove(group)
        self._reserve()  # first: what they leave would find no room beside a batch that is gone
        for generation in leaving:
            self._end(generation)

    def _disband(self, group: Batch, error: Exception) -> None:
        """The answers of a group, of which something raised, go on each alone."""
        self._groups.remove(group)
        log.exception("answers that were computed together go on one by one", answers=len(group.generations))
        self._shortage.heed(error)
        results = group.disband(error)
        self._reserve()
        self._go_on(results)

    def _go_on(self, results: Results) -> None:
        """Each alone, but for those that are done."""
        self._deliver(results)
        for generation, _ in results:
            self._place(generation)

    def _make_room(self) -> None:
        """What nobody uses goes as far as it must; where that is not enough, somebody who runs ends."""
        while results := self.memory.fit(self.cache, self._generations):
            tell(self._outbox, results)
            self._drop()
        self._unsettled = False
        self._waiting.changed = True  # who ended has left room, of which nobody knew until now

    # --- ends

    def _drop(self) -> None:
        """Those for whom nobody waits any more, and who were turned away."""
        if self._waiting.queue or self._waiting.behind:
            self.journal.never_began(self._waiting.drop_cancelled(), "cancelled")
        for generations in (self.prefilling, self._compiling):
            for generation in [each for each in generations if each.dropped]:
                generations.remove(generation)
                self._end(generation)
        for group in list(self._groups):
            self._leave(group, [generation for generation in group.generations if generation.dropped])

    def _deliver(self, results: Results) -> None:
        """Tells what there is to tell, and ends those that are done."""
        done = tell(self._outbox, results)
        self._outbox.send()
        for generation in done:
            self._end(generation)

    def _end(self, generation: Generation) -> None:
        self._waiting.changed = self._unsettled = True
        try:
            generation.close()
        except Exception:
            log.exception("a session could not be closed")
            self._spoiled = True
        self.journal.ended(generation)
        TRACE.lap("keep")

    def _reserve(self) -> None:
        self._waiting.changed = self._unsettled = True
        self.cache.reserve(sum(group.nbytes for group in self._groups))

    def _renew_cache(self) -> None:
        self._outbox.send()
        self.journal.counters.cache_dropped(self.cache.describe().counts)
        give_up(self.cache)
        self.cache, self._spoiled = self._means.make_cache(), False
        collect()
