"""Takes requests from their arrival to their end, one slice at a time."""

from time import perf_counter, perf_counter_ns

from runner.cache.session import Session
from runner.engine.batch import Batch
from runner.engine.batches import Batches
from runner.engine.core import CoreParts
from runner.engine.events import Failed, Outbox, Refused, Started
from runner.engine.generation import Generation, Results
from runner.engine.policy import Begin, Decode, Encode, Prefill, StepLimit, Workload
from runner.engine.queue import MediaQueue, RequestQueue
from runner.engine.recovery import Recovery, collect_garbage, discard
from runner.engine.request import Request
from runner.logs import Log, exception_line
from runner.trace import TRACE

log = Log(__name__)

_RESERVE_SLICES = 64  # between two reservations in the cache of the bytes of growing batches


class Scheduler:
    """Takes requests from station to station, slice by slice. Owner: the engine thread.

    The stations: the queue; the wait for a prefix that another request computes; the prefill, interrupted where a
    picture must be encoded; the wait for the grammar; a batch. A request is at one station at a time, or with the
    recovery after its slice ran out of memory. A fault of one request does not affect the others.
    """

    def __init__(self, parts: CoreParts, parallel: int, outbox: Outbox) -> None:
        """At most `parallel` requests run at the same time; only one if the cache is not concurrent."""
        # Set for good.
        self._parts = parts
        self.memory = parts.memory
        self._policy = parts.policy
        self._outbox = outbox
        self._observer = parts.observer
        self._recovery = Recovery(parts)
        # Replaced when a session cannot be opened or closed.
        self.cache = parts.make_cache()
        self.parallel = parallel if self.cache.concurrent else 1
        """The most requests that run at the same time."""
        # The stations of requests, in order.
        self.queue = RequestQueue(parts.salt, self.parallel)
        self.prefilling: list[Generation] = []
        self._media = MediaQueue(self.memory, self._recovery)
        self._compiling: list[Generation] = []  # prefilled requests whose grammars are still being compiled
        self.batches = Batches(parts, self._recovery)
        # Flags, handled at the end of a slice.
        self._cache_invalid = False
        self._memory_changed = False
        # Counted so far.
        self._slices = 0
        self.prefilled_tokens = 0
        self.prefill_s = 0.0
        """The seconds that the prefilled tokens took."""
        self._make_room()

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.queue.add(request)

    @property
    def idle(self) -> bool:
        """True if there is no slice to compute until a message, a compiled grammar or a decoded picture arrives."""
        return not (
            self.prefilling
            or (self._media.generations and self._media.ready)
            or any(batch.ready for batch in self.batches.all)
            or any(each.grammar.compiled for each in self._compiling)
            or self._next_request
        )

    @property
    def awaits_mask(self) -> bool:
        """True if, on an idle engine, an answer waits for its grammar's mask. No message announces a mask."""
        return bool(self.batches.all)

    @property
    def _next_request(self) -> Request | None:
        waiting = self.queue.arrived or self.queue.awaiting_prefix
        return self.queue.next_request(self.cache, self.memory, len(self._generations)) if waiting else None

    @property
    def _generations(self) -> list[Generation]:
        """The requests that have a session."""
        return [*self.prefilling, *self._media.generations, *self._compiling, *self.batches.generations]

    def compute_slice(self) -> None:
        """Computes one slice: begins a request, computes a part of a prompt or of a picture, or decodes a step of a
        batch. Puts the events for clients into the outbox."""
        started = perf_counter()
        self._remove_dropped()
        for generation in [*self._compiling]:
            if generation.grammar.compiled:
                self._compiling.remove(generation)
                self._continue(generation)
        startable = self._next_request
        ready = [batch for batch in self.batches.all if batch.ready]
        work = Workload(
            startable=int(startable is not None),
            prefilling=[generation.left for generation in self.prefilling],
            encoding=len(self._media.ready) if self._media.generations else 0,
            decoding=[batch.id for batch in ready],
            joining=self.batches.joining if startable or self.prefilling else (),
        )
        chosen = done = self._policy.next(work)
        if TRACE.on:
            TRACE.lap("schedule")
        match chosen:
            case Begin() if startable is not None:
                self._begin(startable)
                TRACE.lap("resume")
            case Prefill(index, tokens):
                done = chosen._replace(tokens=self._prefill(self.prefilling[index], tokens))
            case Encode():
                self._resume(self._media.encode_piece(self.cache))
            case Decode(index):
                batch = self._decode(ready[index], self._policy.step_limit(work, index))
                done = Decode(work.decoding.index(batch.id), batch.forward_rows != 0)
        if done is not None:
            seconds = perf_counter() - started
            self._policy.took(done, work, seconds)
            self._observer.sliced(done, seconds)
            if isinstance(done, Prefill):
                self.prefilled_tokens += done.tokens
                self.prefill_s += seconds
        self._slices += 1
        if self._slices % _RESERVE_SLICES == 0:
            self._reserve()
        if self._recovery.needed:
            results = self._recovery.free_and_restart(self.cache)
            self._cache_invalid |= any(generation.done for generation, _ in results)
            self._resume(results)
        if self._cache_invalid:
            self._replace_cache()
        if self._memory_changed or not isinstance(chosen, Decode):
            self._make_room()

    # --- begin and prefill

    def _begin(self, request: Request) -> None:
        TRACE.name("begin", request=request.number, tokens=len(request.prompt))
        started_ns = self.queue.remove(request)
        if started_ns is None:
            if text := self.memory.refusal(self.cache, len(request.prompt)):
                self._outbox.put(request.stream, Refused(text))
                return self._observer.never_began(request, "refused")
            started_ns = perf_counter_ns()
            self._outbox.put(request.stream, Started())
            if self.cache.follows(request.keys, self._parts.salt):
                return self.queue.await_prefix(request, started_ns)
        session = None
        try:
            session = self._parts.open_session(request, self.cache)
            generation = self._parts.generation(request, session, started_ns)
        except Exception as error:  # this request ends; the engine continues
            log.exception("a request failed", request=request.number)
            self._outbox.put(request.stream, Failed(exception_line(error)))
            self._observer.never_began(request, "failed")
            if session is None:
                self._cache_invalid = True
            else:
                self._close(session)
        else:
            self._observer.began(generation)
            self._continue(generation)

    def _continue(self, generation: Generation) -> None:
        """Moves a request to the station where its next slice is computed."""
        if generation.grammar.compiled and not generation.done:
            self._settle([(generation, generation.start_grammar())])
        if generation.done:
            return
        if generation.lacks_features:
            self._media.generations.append(generation)
        elif generation.left:
            self.prefilling.append(generation)
        elif generation.grammar.compiled:
            self._settle(self.batches.start(generation, self.cache))
        else:
            self._compiling.append(generation)

    def _prefill(self, generation: Generation, most: int) -> int:
        """Computes the next slice of a prompt, or takes a known first token. Returns the number of tokens computed."""
        TRACE.name("prefill", request=generation.request.number, tokens=most)
        computed, first = 0, generation.session.first
        try:
            if first is not None:
                self._settle([(generation, generation.take_first(first))])
            else:
                tokens = self.memory.slice_tokens(self.cache, most, generation.session.position)
                computed = generation.prefill(tokens, self.memory.measured(self._parts.forward))
                self.memory.prefilled(computed, generation.session.position)
        except Exception as error:  # this request restarts or ends; the engine continues
            self.prefilling.remove(generation)
            if first is None:
                generation.note_forward(error)
            self._settle(self._recovery.retry_or_fail(generation, error))
            return 0
        self._observer.prefilled(generation)
        if generation.done or not generation.left or generation.lacks_features:
            self.prefilling.remove(generation)
            self._continue(generation)
        return computed

    # --- decode

    def _decode(self, batch: Batch, limit: StepLimit) -> Batch:
        """Computes a step of `batch`, or of the batch that it joins, within `limit`. Returns the batch that stepped."""
        may_draft = True
        if len(self.batches.all) > 1:
            batch = self._join(batch)
            may_draft = self.batches.may_draft(self.cache)
        try:
            if len(batch.generations) > 1:
                self.batches.make_room(batch, (*self.prefilling, *self._compiling), self.cache)
            choices = batch.step(limit if may_draft else None)
        except Exception as error:
            results = self.batches.end(batch, error)
            if len(batch.generations) > 1:  # a batch of one answer holds nothing beside that answer's layers
                self._reserve()
            self._resume(results)
        else:
            if choices:
                self.memory.stepped(batch.forward_rows)
                done = self._deliver(batch.hand_out(choices))
                self._observer.stepped(batch.generations, perf_counter())
                if done:
                    self._leave(batch, done)
        if batch.split_off:
            self.batches.add_split_off(batch)
            self._reserve()
        self.queue.changed |= batch.steps <= 1  # after the first step, the memory that a request takes is known
        return batch

    def _join(self, batch: Batch) -> Batch:
        before = len(self.batches.all)
        batch, broken_up = self.batches.join(batch, self.cache)
        if len(self.batches.all) < before:
            self._reserve()
            self._resume(broken_up)
        return batch

    def _leave(self, batch: Batch, leaving: list[Generation]) -> None:
        """Ends the `leaving` requests, which decode; the other requests of the batch continue."""
        self._outbox.send()  # now, because the following calls may take long
        broken_up = self.batches.leave(batch, leaving)
        self._reserve()  # first: the cache then has room for the layers of the ended requests
        self._resume(broken_up)
        for generation in leaving:
            self._end(generation)

    def _resume(self, results: Results) -> None:
        """Moves each request to its next station by itself, except requests that are done."""
        self._settle(results)
        for generation, _ in results:
            self._continue(generation)

    def _make_room(self) -> None:
        """Evicts unused cache entries until the running requests fit. If they do not fit even then, ends some."""
        while misfit := self.memory.fit(self.cache, self._generations):
            generation, reason = misfit
            self._deliver([(generation, generation.abort(reason))])
            self._remove_dropped()
        self._memory_changed = False
        self.queue.changed = True  # ended requests have left room for others

    # --- ends

    def _remove_dropped(self) -> None:
        """Ends the requests whose clients have left, and the requests that are done."""
        if self.queue.arrived or self.queue.awaiting_prefix:
            for request in self.queue.remove_cancelled():
                self._observer.never_began(request, "cancelled")
        for generations in filter(None, (self.prefilling, self._media.generations, self._compiling)):
            for generation in [each for each in generations if each.dropped]:
                generations.remove(generation)
                self._end(generation)
        for batch in list(self.batches.all):
            if dropped := [generation for generation in batch.generations if generation.dropped]:
                self._leave(batch, dropped)

    def _deliver(self, results: Results) -> list[Generation]:
        """Puts the events of each generation into the outbox. Returns the generations that are done."""
        done = []
        for generation, events in results:
            for event in events:
                self._outbox.put(generation.request.stream, event)
            if generation.done:
                done.append(generation)
        return done

    def _settle(self, results: Results) -> None:
        """Sends the events, and ends the requests that are done."""
        done = self._deliver(results)
        self._outbox.send()
        for generation in done:
            self._end(generation)

    def _end(self, generation: Generation) -> None:
        self.queue.changed = self._memory_changed = True
        self._close(generation)
        self._observer.ended(generation)
        TRACE.lap("keep")

    def _close(self, open_one: Generation | Session) -> None:
        try:
            open_one.close()
        except Exception:
            log.exception("a session could not be closed")
            self._cache_invalid = True

    def _reserve(self) -> None:
        """Makes the cache leave room for the bytes that the batches hold."""
        self.queue.changed = self._memory_changed = True
        self.cache.reserve(self.batches.nbytes)

    def _replace_cache(self) -> None:
        """Replaces the cache by a new one. Running requests keep the layers of the old cache until they end."""
        self._outbox.send()
        self._observer.cache_replaced(self.cache)
        discard(self.cache)
        self.cache = self._parts.make_cache()
        self._cache_invalid = False
        collect_garbage()
