"""Puts an engine's parts on a tape: its forward, its memory, its clock, its drafts, its grammars and its generations.

Each function and class takes the part itself, and behaves as that, as far as the engine can see.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from protocol import Logprob
from runner.cache.session import Session
from runner.engine.events import Event
from runner.engine.generation import Forward, Generation
from runner.engine.guide import Follow, Grammar, Guide, State, StateSource
from runner.engine.parts import Sources, World
from runner.engine.policy import Slice, SlicePolicy, Workload
from runner.engine.request import Request
from runner.errors import RequestError
from runner.tape.tape import EntryKind, Tape, Value
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    import mlx.core as mx

    from runner.engine.memory import Meter
    from runner.engine.ports import Drafter, PromptMedia
    from runner.sampling.sampler import Broadcast

_FAULTS: tuple[type[Exception], ...] = (RuntimeError, ValueError, MemoryError, TypeError)


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
            clock=lambda: tape.input(EntryKind.SECONDS, sources.clock),
            policy=TapedPolicy(policy.chunk_tokens, policy.max_gap_s, tape),
            grammar_bytes=lambda: tape.input(EntryKind.GRAMMAR_BYTES, sources.grammar_bytes),
            begin=partial(TapedGeneration, tape),
            step_s=lambda seconds: tape.input(EntryKind.SECONDS, lambda: seconds),
        )

    def _amount(self, amount: int) -> int:
        """Returns an amount of memory of the machine, or of the one that was recorded."""
        return self._tape.input(EntryKind.MACHINE, lambda: amount)


def forward(run: "Forward", tape: Tape) -> "Forward":
    """Returns the forward `run`, before which the tape is flushed."""

    def flushed(tokens: "mx.array", layers: list[object]) -> "mx.array":
        tape.flush()
        with faults(tape):
            return run(tokens, layers)

    return flushed


@contextmanager
def faults(tape: Tape) -> Iterator[None]:
    """A block of computation whose exception stands on the tape; in a replay it is raised at the end of the block."""
    try:
        yield
    except Exception as error:
        tape.check(EntryKind.FAULT, [type(error).__name__, str(error)])
        raise
    recorded: Value = tape.input(EntryKind.FAULT, lambda: None)
    if isinstance(recorded, list):
        name, text = recorded
        known = {each.__name__: each for each in _FAULTS}
        raise (known.get(str(name)) or type(str(name), (Exception,), {}))(text)


class TapedMeter:
    """A meter whose readings stand on the tape."""

    def __init__(self, meter: "Meter", tape: Tape) -> None:
        self._meter = meter
        self._tape = tape
        self.restart = meter.restart
        self.clear = meter.clear
        self.settle = meter.settle

    def active(self) -> int:
        return self._tape.input(EntryKind.ACTIVE, self._meter.active)

    def peak(self) -> int:
        return self._tape.input(EntryKind.PEAK, self._meter.peak)


class TapedPolicy(SlicePolicy):
    """A policy that learns the times on the tape."""

    def __init__(self, chunk_tokens: int, max_gap_s: float, tape: Tape) -> None:
        super().__init__(chunk_tokens, max_gap_s)
        self._tape = tape

    def took(self, slice: Slice, work: Workload, seconds: float) -> None:  # noqa: A002 - as in the base class
        super().took(slice, work, self._tape.input(EntryKind.SECONDS, lambda: seconds))


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
        media: "PromptMedia",
        drafter: "Drafter | None",
        broadcast: "Broadcast | None",
    ) -> None:
        super().__init__(request, session, tokenizer, context_length, started_ns, media, drafter, broadcast)
        self._tape = tape
        self._ended = False

    def prefill(self, most: int, forward: Forward) -> int:
        with faults(self._tape):
            return super().prefill(most, forward)

    def push(self, tokens: Sequence[int], entry: Logprob | None = None, *, completes: bool = False) -> list[Event]:
        if tokens:
            self._tape.check(EntryKind.TOKENS, [self.request.number, *tokens])
        return super().push(tokens, entry, completes=completes)

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        super().close()
        life, session = self.life, self.session
        counts = [session.total, session.matched, session.cached, session.evicted_bytes]
        drafts = [life.generated, life.forced, life.known, life.drafted, life.accepted]
        self._tape.check(EntryKind.ENDED, [self.request.number, life.outcome, *counts, *drafts])


# --- Grammars on a tape: the states that their workers send are inputs.

_MOST_KNOWN_BYTES = 8 << 20
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(State).decode


class KnownStates:
    """The latest states on a tape, by their places: answers come back to the same few, and a mask has a bit for each
    token of the vocabulary. Both who writes a tape and who reads it know the same ones."""

    def __init__(self) -> None:
        self._bodies: dict[int, bytes] = {}
        self._places: dict[bytes, int] = {}
        self._count = 0
        self._nbytes = 0

    def place(self, body: bytes) -> int | bytes:
        """Returns what stands for the state on the tape: its place, or itself if it is new."""
        return self._places.get(body, body)

    def body(self, found: int | bytes) -> bytes:
        """Returns the state for which this stands on the tape. Raises ValueError if there is none."""
        if isinstance(found, int):
            if found not in self._bodies:
                raise ValueError(f"no state {found}")
            return self._bodies[found]
        self._bodies[self._count] = found
        self._places[found] = self._count
        self._count += 1
        self._nbytes += len(found)
        while self._nbytes > _MOST_KNOWN_BYTES:
            oldest = self._bodies.pop(next(iter(self._bodies)))
            self._places.pop(oldest, None)
            self._nbytes -= len(oldest)
        return found


class TapedGrammar:
    """A compiled grammar whose states stand on the tape. Owner: the engine thread."""

    def __init__(self, tape: Tape, known: KnownStates, grammar: Grammar | None, vocab_size: int) -> None:
        """`grammar` is None where the tape is read, which has all of its states; `vocab_size` counts there."""
        self._tape = tape
        self._known = known
        self._grammar = grammar
        self._vocab_size = vocab_size

    def guide(self) -> Guide | None:
        """Returns the guide; None after `release`."""
        own: Guide | None = None

        def begin() -> Value:
            nonlocal own
            assert self._grammar is not None
            own = self._grammar.guide()
            return None if own is None else self._known.place(_encode(own.state))

        found = msgspec.convert(_input(self._tape, EntryKind.GRAMMAR, begin), int | bytes | None)
        if found is None:
            return None
        size = self._vocab_size if own is None else own.size
        state = _state(self._known.body(found), size)
        source = _TapedSource(self._tape, self._known, None if own is None else own.source, size)
        return Guide(source, state, size, lambda: self._tape.input(EntryKind.SECONDS, monotonic))

    def release(self) -> None:
        """Gives the grammar back without an answer."""
        if self._grammar is not None:
            self._grammar.release()


class _TapedSource:
    """The states of one answer: on the tape stands when each came, what it took, and what it says."""

    def __init__(self, tape: Tape, known: KnownStates, source: StateSource | None, size: int) -> None:
        self._tape = tape
        self._known = known
        self._source = source
        self._size = size

    def send(self, step: Follow) -> None:
        def send() -> None:
            assert self._source is not None
            self._source.send(step)

        _input(self._tape, EntryKind.GRAMMAR, send)

    def receive(self, patience_s: float) -> State | None:
        def receive() -> Value:
            assert self._source is not None
            state = self._source.receive(patience_s)
            if state is None:
                return None
            return [state.seconds, self._known.place(_encode(msgspec.structs.replace(state, seconds=0.0, nbytes=0)))]

        recorded = _input(self._tape, EntryKind.STATE, receive)
        if recorded is None:
            return None
        seconds, found = msgspec.convert(recorded, tuple[float, int | bytes])
        return msgspec.structs.replace(_state(self._known.body(found), self._size), seconds=seconds)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def _input(tape: Tape, kind: EntryKind, read: Callable[[], Value]) -> Value:
    """Returns the value of `read`. If that raises RequestError, its text stands on the tape, and this raises it."""

    def attempt() -> Value:
        try:
            return read()
        except RequestError as error:
            return str(error)

    found = tape.input(kind, attempt)
    if isinstance(found, str):
        raise RequestError(found)
    return found


def _state(body: bytes, size: int) -> State:
    """Returns a state on a tape. Raises ValueError if it names a token beyond the vocabulary: a file may come from
    anybody."""
    state = _decode(body)
    tokens = [*state.forced, *(each for each in state.tried or () if isinstance(each, int))]
    if not all(0 <= token < size for token in tokens):
        raise ValueError("a grammar names a token that the model does not have")
    return state
