"""Takes requests from their arrival to their end, one slice at a time."""

from functools import partial
from time import perf_counter, perf_counter_ns
from typing import NamedTuple

from runner.cache import PrefixCache
from runner.cache.session import Session
from runner.engine.batch import Batch, tell
from runner.engine.batches import Batches, BatchMatcher
from runner.engine.context import EngineContext
from runner.engine.events import Event, Failed, Outbox, Refused, Started
from runner.engine.generation import Generation, Results
from runner.engine.journal import Journal
from runner.engine.memory import MemoryBudget
from runner.engine.policy import Begin, Decode, Encode, Prefill, Slice, SlicePolicy, View
from runner.engine.queue import RequestQueue
from runner.engine.recovery import Recovery, collect_garbage, discard
from runner.engine.request import Request
from runner.engine.trace import TRACE
from runner.logs import Log, error_line

log = Log(__name__)

# --- Known choices: the beginning of an answer that is taken without a forward, because the cache knows what it
# would be. Only plain greedy answers begin so: each token is the most probable one, whatever was drawn before, and
# nobody wants its probability. The end of an answer is always computed: the token that ends it, the one that
# completes a stop string, the last one that it may have. So answers end, and leave the cache, as they would
# without.

_PIECE_TOKENS = 64
"""Of one slice, and of one line to the client: they take less than a millisecond."""


def open_session(cache: PrefixCache, request: Request, context: EngineContext) -> Session:
    """Opens a session. If the answer is a plain greedy one, its tokens will be known choices; if, moreover, nobody
    wants their probabilities, it begins with those that the cache knows."""
    if request.sampling.greedy and request.grammar is None:
        most = 0 if request.sampling.logprobs else request.max_tokens - 1
        return cache.begin_greedy(request.keys, most, context.tokenizer.eos, context.salt)
    return cache.begin(request.keys, context.salt)


def take_known(generation: Generation) -> list[Event]:
    """Gives a generation the next of its known tokens. Returns the events for the client."""
    session, life = generation.session, generation.life
    life.decoded_ns = life.decoded_ns or perf_counter_ns()
    coming = session.known[:_PIECE_TOKENS]
    count = generation.text.before_stop(coming)
    events = generation.push(coming[:count])
    life.known += count
    del session.known[:count]
    if count < len(coming) or not session.known:
        session.end_known()
    return events


# --- The requests whose prompts have come to a picture, which is encoded piece by piece.


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
        return [each for each in self.generations if each.pictures.ready]

    def advance(self, cache: PrefixCache) -> Encoded | None:
        """Computes one piece of a picture. Returns the request that goes on elsewhere; None if there is more to do."""
        generation = self.ready[0]
        TRACE.name("encode", request=generation.request.number)
        results: Results = []
        goes_on = False
        try:
            if not generation.pictures.advance(partial(self._memory.make_room, cache)):
                return None
            goes_on = True
        except Exception as error:  # this request restarts or ends, the engine goes on
            results = self._recovery.retry_or_fail(generation, error)
        self.generations.remove(generation)
        return Encoded(generation, results, goes_on)


_RESERVE_SLICES = 64  # between two times that the cache learns the bytes of batches, which grow


class Scheduler:
    """Advances requests slice by slice. Owner: the engine thread.

    A request waits in the queue, then for a prefix that another one computes, is prefilled, waits for its grammar, and
    decodes in a batch: in one of these places at a time. A fault of one request leaves the others as they are.
    """

    def __init__(self, context: EngineContext, policy: SlicePolicy, parallel: int, outbox: Outbox) -> None:
        """At most `parallel` requests run at once, and only one if the cache is not concurrent."""
        self.cache = context.make_cache()
        self._context, self.memory, self._policy, self._outbox = context, context.memory, policy, outbox
        self.parallel = parallel if self.cache.concurrent else 1
        """The most requests that run at once."""
        self._queue = RequestQueue(context.salt, self.parallel)
        self.journal = Journal(self._queue)
        self.prefilling: list[Generation] = []  # their prompts are being computed
        self._compiling: list[Generation] = []  # prefilled, while their grammars are still being compiled
        self.matcher = BatchMatcher(context.unbatchable)
        self._recovery = Recovery(self.memory, context.salt, context.ranks)
        self._encodings, self.batches = Encodings(self.memory, self._recovery), Batches(self.matcher, self._recovery)
        self._cache_invalid = False  # replace it before the next request begins
        self._slices = 0
        self._make_room()

    def add(self, request: Request) -> None:
        """Queues a request."""
        self._queue.add(request)

    @property
    def idle(self) -> bool:
        """True if there is nothing to do until a message arrives, a grammar is compiled or a picture is decoded."""
        return not (
            self.prefilling
            or (self._encodings.generations and self._encodings.ready)
            or any(batch.ready for batch in self.batches.all)
            or any(each.grammar.compiled for each in self._compiling)
            or self._next_request
        )

    @property
    def awaits_mask(self) -> bool:
        """True, while idle, if an answer waits for the mask of its grammar, of which no message tells."""
        return bool(self.batches.all)

    @property
    def _next_request(self) -> Request | None:
        waiting = self._queue.arrived or self._queue.awaiting_prefix
        return self._queue.next_request(self.cache, self.memory, len(self._generations)) if waiting else None

    @property
    def _generations(self) -> list[Generation]:
        """The requests that have a session."""
        return [*self.prefilling, *self._encodings.generations, *self._compiling, *self.batches.generations]

    def advance(self) -> None:
        """Computes one slice: begins a request, computes a part of a prompt, or decodes a step of a batch."""
        started = perf_counter()
        self._remove_dropped()
        for generation in [each for each in self._compiling if each.grammar.compiled]:
            self._compiling.remove(generation)
            self._continue(generation)
        startable, ready = self._next_request, [batch for batch in self.batches.all if batch.ready]
        view = View(
            startable=int(startable is not None),
            prefilling=[generation.left for generation in self.prefilling],
            encoding=len(self._encodings.ready) if self._encodings.generations else 0,
            decoding=[batch.id for batch in ready],
        )
        chosen = self._policy.next(view)
        if TRACE.on:
            TRACE.lap("schedule")
        if chosen is not None:
            done = self._run(chosen, view, startable, ready)
            self._policy.took(done, view, perf_counter() - started)
            self.journal.counters.sliced(done, perf_counter() - started)
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

    def _run(self, chosen: Slice, view: View, startable: Request | None, ready: list[Batch]) -> Slice:
        """Computes a slice; returns what was really done."""
        match chosen:
            case Begin() if startable is not None:
                TRACE.name("begin", request=startable.number, tokens=len(startable.prompt))
                self._begin(startable)
                TRACE.lap("resume")
            case Prefill(index, tokens):
                self._queue.changed = True
                TRACE.name("prefill", request=self.prefilling[index].request.number, tokens=tokens)
                return chosen._replace(tokens=self._prefill(self.prefilling[index], tokens))
            case Decode(index):
                return Decode(view.decoding.index(self._decode(ready[index])))
            case Encode():
                self._encode()
        return chosen

    # --- begin and prefill

    def _begin(self, request: Request) -> None:
        started_ns = self._queue.remove(request)
        if started_ns is None:
            if text := self.memory.refusal(self.cache, len(request.prompt)):
                self._outbox.put(request.stream, Refused(text))
                return self.journal.never_began([request], "refused")
            started_ns = perf_counter_ns()
            self._outbox.put(request.stream, Started())
            if self.cache.follows(request.keys, self._context.salt):
                return self._queue.await_prefix(request, started_ns)
        try:
            generation = self._context.generation(request, open_session(self.cache, request, self._context), started_ns)
        except Exception as error:  # this request ends, the engine goes on
            log.exception("a request failed", request=request.number)
            self._outbox.put(request.stream, Failed(error_line(error)))
            self.journal.never_began([request], "failed")
            self._cache_invalid = True
        else:
            self.journal.began(generation)
            self._continue(generation)

    def _continue(self, generation: Generation) -> None:
        """Moves a request to where its next slice is computed."""
        if generation.grammar.compiled and not generation.done:
            self._deliver([(generation, generation.start_grammar())])
        if generation.done:
            return
        if generation.lacks_picture:
            self._encodings.generations.append(generation)
        elif generation.left:
            self.prefilling.append(generation)
        elif generation.grammar.compiled:
            self._deliver(self.batches.start(generation, self._context, self.cache))
        else:
            self._compiling.append(generation)

    def _prefill(self, generation: Generation, most: int) -> int:
        """Computes the next slice of a prompt, or takes known tokens; returns the number of tokens computed."""
        computed = 0
        try:
            if generation.session.known:
                self._deliver([(generation, take_known(generation))])
            else:
                tokens = self.memory.slice_tokens(self.cache, most, generation.session.position)
                computed = generation.prefill(tokens, self.memory.measured(self._context.forward))
                self.memory.prefilled(computed, generation.session.position)
        except Exception as error:  # this request restarts or ends, the engine goes on
            self.prefilling.remove(generation)
            self._deliver(self._recovery.retry_or_fail(generation, error))
            return 0
        self.journal.prefilled(generation)
        if generation.done or not generation.left or generation.lacks_picture:
            self.prefilling.remove(generation)
            self._continue(generation)
        return computed

    def _encode(self) -> None:
        """Computes one piece of a picture."""
        if (encoded := self._encodings.advance(self.cache)) is not None:
            self._deliver(encoded.results)
            if encoded.goes_on:
                self._continue(encoded.generation)

    # --- decode

    def _decode(self, batch: Batch) -> int:
        """Computes a step of this batch, or of the one that it joins. Returns the id of the batch that stepped."""
        if len(self.batches.all) > 1:
            batch = self._join(batch)
        batch.may_draft = len(self.batches.all) == len(batch.generations) == 1 and bool(batch.generations[0].drafter)
        try:
            choices = batch.step()
        except Exception as error:
            results = self.batches.end(batch, error)
            if len(batch.generations) > 1:  # an answer alone holds nothing beside its layers
                self._reserve()
            self._resume(results)
        else:
            if choices:
                self.memory.stepped(batch.forward_rows)
                done = tell(self._outbox, batch.take(choices))
                self.journal.counters.stepped(batch.generations, perf_counter())
                if done:
                    self._leave(batch, done)
        if batch.split_off:
            self.batches.add_split_off(batch)
            self._reserve()
        self._queue.changed |= batch.steps <= 1  # the very first forward shows what a request takes
        return batch.id

    def _join(self, batch: Batch) -> Batch:
        joined, broken_up = self.batches.join(batch, self.cache)
        if joined is not batch or broken_up:
            self._reserve()
            self._resume(broken_up)
        return joined

    def _leave(self, batch: Batch, leaving: list[Generation]) -> None:
        """Ends requests that decode; the others of their batch go on."""
        self._outbox.send()  # the rest may take a while
        broken_up = self.batches.leave(batch, leaving)
        self._reserve()  # first: what is kept of these requests would find no room beside a batch that is gone
        self._resume(broken_up)
        for generation in leaving:
            self._end(generation)

    def _resume(self, results: Results) -> None:
        """Lets each of these requests go on by itself, except those that are done."""
        self._deliver(results)
        for generation, _ in results:
            self._continue(generation)

    def _make_room(self) -> None:
        """Evicts unused cache entries as far as necessary; if that is not enough, ends running requests."""
        while misfit := self.memory.fit(self.cache, self._generations):
            generation, reason = misfit
            tell(self._outbox, [(generation, generation.abort(reason))])
            self._remove_dropped()
        self._memory_changed = False
        self._queue.changed = True  # requests that ended have left room

    # --- ends

    def _remove_dropped(self) -> None:
        """Ends the requests whose clients have left, and those that were turned away."""
        if self._queue.arrived or self._queue.awaiting_prefix:
            self.journal.never_began(self._queue.remove_cancelled(), "cancelled")
        for generations in filter(None, (self.prefilling, self._encodings.generations, self._compiling)):
            for generation in [each for each in generations if each.dropped]:
                generations.remove(generation)
                self._end(generation)
        for batch in list(self.batches.all):
            if dropped := [generation for generation in batch.generations if generation.dropped]:
                self._leave(batch, dropped)

    def _deliver(self, results: Results) -> None:
        """Sends events to clients, and ends the requests that are done."""
        done = tell(self._outbox, results)
        self._outbox.send()
        for generation in done:
            self._end(generation)

    def _end(self, generation: Generation) -> None:
        self._queue.changed = self._memory_changed = True
        try:
            generation.close()
        except Exception:
            log.exception("a session could not be closed")
            self._cache_invalid = True
        self.journal.ended(generation)
        TRACE.lap("keep")

    def _reserve(self) -> None:
        """Tells the cache how many bytes the batches hold."""
        self._queue.changed = self._memory_changed = True
        self.cache.reserve(self.batches.nbytes)

    def _replace_cache(self) -> None:
        """Discards the cache; running requests keep its layers until they end."""
        self._outbox.send()
        self.journal.counters.cache_replaced(self.cache.describe().counts)
        discard(self.cache)
        self.cache, self._cache_invalid = self._context.make_cache(), False
        collect_garbage()
