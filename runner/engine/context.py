"""What the requests of one engine have in common."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from runner.cache import Cache
from runner.engine.generation import Forward
from runner.engine.memory.budget import MemoryBudget
from runner.tokenizer import Tokenizer


class BatchTrial(Protocol):
    """Finds out, slice by slice, whether several rows can be decoded in one forward."""

    @property
    def fault(self) -> str | None:
        """Why they cannot; empty if they can, None while that is not known."""
        ...

    def advance(self) -> None:
        """One slice, of no more work than 16 tokens of a prompt. Never raises."""
        ...


class SettledTrial(NamedTuple):
    """A trial that is over."""

    fault: str = ""

    def advance(self) -> None:
        """Nothing is left to try."""


class EngineContext(NamedTuple):
    """What requests are computed with."""

    forward: Forward
    tokenizer: Tokenizer
    context_length: int
    make_cache: Callable[[], Cache]
    memory: MemoryBudget
    salt: str = ""
    """Names what changes the meaning of what the cache keeps: prompts of different salts share nothing."""
    trial: BatchTrial = SettledTrial()
    """Whether the model can decode several rows in one forward."""
