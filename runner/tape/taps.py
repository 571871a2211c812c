"""Puts an engine's parts on a tape: its forward, its memory, its clock, its drafts and what it tells its clients.

Each function and class takes the part itself, and behaves as that, as far as the engine can see.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary
from zlib import crc32

import msgspec

from protocol import Logprob
from runner.cache.session import Session
from runner.engine.events import Event, EventStream, Failed, Finished, Outbox, Refused, Scored, Started, Text
from runner.engine.generation import Forward, Generation
from runner.engine.policy import Slice, SlicePolicy, View
from runner.engine.ports import Tape, Value, What
from runner.engine.request import Request
from runner.engine.world import Sources, World
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    import mlx.core as mx

    from runner.engine.memory import Meter
    from runner.engine.ports import Drafter, Pictures
    from runner.sampling.sampler import Sampler

_FAULTS: tuple[type[Exception], ...] = (RuntimeError, ValueError, MemoryError, TypeError)


def forward(run: "Forward", tape: Tape) -> "Forward":
    """Returns the forward `run`, before which the tape is flushed."""

    def flushed(tokens: "mx.array", layers: list[object]) -> "mx.array":
        tape.flush()
        with Faults(tape):
            return run(tokens, layers)

    return flushed


class Faults:
    """A block of computation whose exception stands on the tape; in a replay it is raised at the end of the block."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Ends the block."""
        if error is not None and not isinstance(error, Exception):
            return
        met: list[Value] | None = None if error is None else [type(error).__name__, str(error)]
        told = self._tape.fault(met)
        if told is not None and error is None:
            raise _fault(*told)


def _fault(name: Value, text: Value) -> Exception:
    known = {each.__name__: each for each in _FAULTS}
    kind: type[Exception] = known.get(str(name)) or type(str(name), (Exception,), {})
    return kind(text)


class TapedMeter:
    """A meter whose readings stand on the tape."""

    def __init__(self, meter: "Meter", tape: Tape) -> None:
        self._meter, self._tape = meter, tape
        self.restart, self.clear, self.settle = meter.restart, meter.clear, meter.settle

    def active(self) -> int:
        return self._tape.of(What.ACTIVE, self._meter.active)

    def peak(self) -> int:
        return self._tape.of(What.PEAK, self._meter.peak)


class TapedPolicy(SlicePolicy):
    """A policy that learns the times on the tape."""

    def __init__(self, chunk_tokens: int, max_gap_s: float, tape: Tape) -> None:
        super().__init__(chunk_tokens, max_gap_s)
        self._tape = tape

    def took(self, slice: Slice, view: View, seconds: float) -> None:  # noqa: A002 - as in the base class
        super().took(slice, view, self._tape.of(What.SECONDS, lambda: seconds))


def clock(read: Callable[[], float], tape: Tape) -> Callable[[], float]:
    """Returns a clock whose readings stand on the tape."""
    return lambda: tape.of(What.SECONDS, read)


def grammar_bytes(read: Callable[[], int], tape: Tape) -> Callable[[], int]:
    """Returns the function, what it returns standing on the tape."""
    return lambda: tape.of(What.GRAMMAR_BYTES, read)


class TapedWorld(World):
    """A world whose values stand on a tape."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def machine(self, total_bytes: int, budget_bytes: int) -> tuple[int, int]:
        return self._amount(total_bytes), self._amount(budget_bytes)

    def wrap(self, sources: Sources) -> Sources:
        tape, policy = self._tape, sources.policy
        return Sources(
            reuse_bytes=self._amount(sources.reuse_bytes),
            forward=forward(sources.forward, tape),
            meter=TapedMeter(sources.meter, tape),
            clock=clock(sources.clock, tape),
            policy=TapedPolicy(policy.chunk_tokens, policy.max_gap_s, tape),
            grammar_bytes=grammar_bytes(sources.grammar_bytes, tape),
            begin=partial(TapedGeneration, tape),
        )

    def _amount(self, amount: int) -> int:
        """Returns an amount of memory of the machine, or of the one that was recorded."""
        return self._tape.of(What.MACHINE, lambda: amount)


class TapedDrafter:
    """A drafter that learns the times on the tape."""

    def __init__(self, drafter: "Drafter", tape: Tape) -> None:
        self._drafter, self._tape = drafter, tape
        self.index, self.record_outcome, self.close = drafter.index, drafter.record_outcome, drafter.close

    def expects(self, session: "Session", most: int) -> bool:
        return self._drafter.expects(session, most)

    def propose(self, session: "Session", most: int, sampler: "Sampler") -> Sequence[int]:
        return self._drafter.propose(session, most, sampler)

    def record_time(self, tokens: int, rows: int, seconds: float) -> None:
        self._drafter.record_time(tokens, rows, self._tape.of(What.SECONDS, lambda: seconds))


class TapedOutbox(Outbox):
    """An outbox that notes what clients are told."""

    def __init__(self, outbox: Outbox, tape: Tape) -> None:
        self._outbox, self._tape = outbox, tape
        self.numbers: WeakKeyDictionary[EventStream, int] = WeakKeyDictionary()
        """The number of the request that each stream belongs to."""

    def put(self, stream: EventStream, event: Event) -> None:
        self._tape.same(What.EVENT, [self.numbers[stream], *told(event)])
        self._outbox.put(stream, event)

    def send(self) -> None:
        self._outbox.send()


def told(event: Event) -> list[Value]:
    """Returns what a client reads of an event, but for durations; log-probabilities as a checksum."""
    match event:
        case Refused(text) | Failed(text):
            return [type(event).__name__.lower(), text]
        case Text(text, logprobs):
            return [text, crc32(msgspec.msgpack.encode(logprobs))] if logprobs else [text]
        case Scored(logprobs):
            return ["scored", crc32(msgspec.msgpack.encode(logprobs))]
        case Finished(reason, metrics):
            counts = (metrics.prompt_eval_count, metrics.prompt_eval_cached_count, metrics.eval_count)
            return ["finished", str(reason), *counts]
        case Started():
            return ["started"]


# --- A generation on a tape.


class TapedGeneration(Generation):
    """A generation that notes its tokens and its end. Owner: the engine thread."""

    def __init__(
        self,
        tape: Tape,
        request: Request,
        session: Session,
        tokenizer: Tokenizer,
        context_length: int,
        started_ns: int,
        pictures: "Pictures",
        drafter: "Drafter | None",
    ) -> None:
        taped = None if drafter is None else TapedDrafter(drafter, tape)
        super().__init__(request, session, tokenizer, context_length, started_ns, pictures, taped)
        self._tape = tape
        self._ended = False

    def prefill(self, most: int, forward: Forward) -> int:
        with Faults(self._tape):
            return super().prefill(most, forward)

    def push(self, tokens: Sequence[int], entry: Logprob | None = None, *, completes: bool = False) -> list[Event]:
        if tokens:
            self._tape.same(What.TOKENS, [self.request.number, *tokens])
        return super().push(tokens, entry, completes=completes)

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        super().close()
        life, session = self.life, self.session
        counts = [session.total, session.matched, session.cached, session.evicted_bytes]
        drafts = [life.generated, life.forced, life.known, life.drafted, life.accepted]
        self._tape.same(What.ENDED, [self.request.number, life.outcome, *counts, *drafts])
