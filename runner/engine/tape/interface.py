"""What the engine knows of a tape."""

from collections.abc import Callable
from enum import IntEnum
from typing import Protocol, TypeVar

Value = None | bool | int | float | str | bytes | list["Value"]
"""What can stand on a tape."""
Read = TypeVar("Read", bound=Value)


class What(IntEnum):
    """The kinds of value on a tape. A number keeps its meaning as long as the version of the format stays."""

    TURN = 0
    """What happened outside before a slice: a `Turn`, or nothing."""
    TRIAL = 1
    """A slice of the trial of batches in idle time."""
    SECONDS = 2
    """The time that a slice or a step took, or a clock."""
    ACTIVE = 3
    """The bytes that MLX has in use."""
    PEAK = 4
    """The most bytes that it had."""
    GRAMMAR_BYTES = 5
    """The bytes that grammars take."""
    MACHINE = 6
    """The bytes of the memory, of the budget, or of what may be kept for reuse."""
    FAULT = 7
    """The exception that a computation raised, or nothing."""
    GRAMMAR = 8
    """Why a grammar could not be followed, or nothing."""
    STATE = 9
    """The next state of a grammar, or nothing if it is late."""
    TOKENS = 10
    """The number of a request, and its next tokens."""
    EVENT = 11
    """The number of a request, and what its client is told."""
    ENDED = 12
    """The number of a request, its outcome, and its counts."""
    FORWARD = 13
    """Between ranks: the shape of the tokens of a forward, and the position that it begins at."""

    @property
    def label(self) -> str:
        """The kind in words."""
        return self.name.lower().replace("_", " ")


class Tape(Protocol):
    """Takes every value from outside, or gives those that were taken. Owner: the engine thread."""

    def of(self, what: What, make: Callable[[], Read]) -> Read:
        """Returns what `make` returns, which must not raise; in a replay, what it returned when it was recorded."""
        ...

    def same(self, what: What, value: Value) -> None:
        """Notes a value that follows from those before it; in a replay, it must be the one that was noted."""
        ...

    def fault(self, met: list[Value] | None) -> list[Value] | None:
        """Returns the fault that struck a computation, type and text, which is `met` or nothing; in a replay, the one
        that struck when it was recorded."""
        ...

    def flush(self) -> None:
        """Lets go of everything so far, in one write. Called before every forward: it may never come back."""
        ...
