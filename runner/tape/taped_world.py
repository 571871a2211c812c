"""Sends values of an engine's parts through a tape: the forward, the memory, the clock and the generations.

Each function and class here wraps one part, and the engine uses it like that part.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from protocol import Logprob
from runner.engine.engine import Turns, World
from runner.engine.events import Event
from runner.engine.generation import Forward, Generation
from runner.engine.memory import Meter
from runner.engine.parts import Parts
from runner.engine.policy import Slice, SlicePolicy, Workload
from runner.tape.tape import EntryKind, Tape, Value

if TYPE_CHECKING:
    import mlx.core as mx


_FAULTS: tuple[type[Exception], ...] = (RuntimeError, ValueError, MemoryError, TypeError)


class TapedWorld(World):
    """A world whose values go through a tape: noted there, or played back from there."""

    def __init__(self, tape: Tape, turns: Turns) -> None:
        super().__init__(turns)
        self._tape = tape

    def machine(self, total_bytes: int, budget_bytes: int) -> tuple[int, int]:
        return self._amount(total_bytes), self._amount(budget_bytes)

    def forward(self, run: Forward) -> Forward:
        return flushed_forward(run, self._tape)

    def wrap(self, parts: Parts) -> None:
        tape, clock, outside_bytes = self._tape, parts.clock, parts.outside_bytes
        parts.reuse_bytes = self._amount(parts.reuse_bytes)
        parts.forward = self.forward(parts.forward)
        parts.meter = TapedMeter(parts.meter, tape)
        parts.clock = lambda: tape.input(EntryKind.SECONDS, clock)
        parts.policy = TapedPolicy(parts.policy.chunk_tokens, parts.policy.max_gap_s, tape)
        parts.outside_bytes = lambda: tape.input(EntryKind.GRAMMAR_BYTES, outside_bytes)
        parts.begin = partial(TapedGeneration, tape)
        parts.step_s = lambda seconds: tape.input(EntryKind.SECONDS, lambda: seconds)

    def _amount(self, amount: int) -> int:
        """Returns an amount of memory: this machine's or, in a replay, the recorded one."""
        return self._tape.input(EntryKind.MACHINE, lambda: amount)


def flushed_forward(run: "Forward", tape: Tape) -> "Forward":
    """Returns the forward `run`. Before each call of it, the tape is flushed."""

    def flushed(tokens: "mx.array", layers: list[object]) -> "mx.array":
        tape.flush()
        with faults(tape):
            return run(tokens, layers)

    return flushed


@contextmanager
def faults(tape: Tape) -> Iterator[None]:
    """A block of computation whose exception is noted on the tape. In a replay, a recorded exception is raised at the
    end of the block."""
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


class TapedMeter(Meter):
    """A meter whose readings go through a tape."""

    def __init__(self, meter: Meter, tape: Tape) -> None:
        self._meter = meter
        self._tape = tape

    def active(self) -> int:
        return self._tape.input(EntryKind.ACTIVE, self._meter.active)

    def peak(self) -> int:
        return self._tape.input(EntryKind.PEAK, self._meter.peak)


class TapedPolicy(SlicePolicy):
    """A policy that learns the times of slices from the tape."""

    def __init__(self, chunk_tokens: int, max_gap_s: float, tape: Tape) -> None:
        super().__init__(chunk_tokens, max_gap_s)
        self._tape = tape

    def took(self, slice: Slice, work: Workload, seconds: float) -> None:  # noqa: A002 - as in the base class
        super().took(slice, work, self._tape.input(EntryKind.SECONDS, lambda: seconds))


class TapedGeneration(Generation):
    """A generation that notes its tokens and its end on a tape. Owner: the engine thread."""

    def __init__(self, tape: Tape, *arguments: object) -> None:
        """`arguments` are those of `Generation`."""
        super().__init__(*arguments)  # type: ignore[arg-type]
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
