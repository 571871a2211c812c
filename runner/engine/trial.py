"""Trials of a model: what it can do is found out slice by slice, once something would gain from it."""

from dataclasses import dataclass
from typing import ClassVar, Protocol


class Trial(Protocol):
    """Finds out, slice by slice, whether a model can do something."""

    @property
    def fault(self) -> str | None:
        """The reason why it cannot; empty if it can, None while that is not known."""
        ...

    def advance(self) -> None:
        """Computes one slice, of no more work than 16 tokens of a prompt. Never raises."""
        ...


class IdleTrial(Protocol):
    """A trial that goes on while nothing else is to be done."""

    @property
    def untried(self) -> bool:
        """True until it is over."""
        ...

    def advance(self) -> None:
        """Computes one slice."""
        ...


def first_untried(*trials: IdleTrial) -> IdleTrial | None:
    """Returns the first of these trials that is not over."""
    return next((each for each in trials if each.untried), None)


@dataclass(frozen=True)
class SettledTrial:
    """A trial that is over."""

    fault: str = ""
    waits: ClassVar[bool] = False
    untried: ClassVar[bool] = False

    def advance(self) -> None:
        """Does nothing."""
