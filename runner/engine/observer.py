"""The port through which a scheduler's requests are counted and logged."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from runner.engine.policy import Slice

if TYPE_CHECKING:
    from runner.cache import PrefixCache
    from runner.engine.generation import Generation
    from runner.engine.request import Request


class Observer:
    """Notes what a scheduler does, and changes nothing. This class notes nothing. Owner: the engine thread."""

    def never_began(self, request: "Request", outcome: str) -> None:
        """Notes that a request ended without a session; `outcome` is a field of `RequestCounts`."""

    def began(self, generation: "Generation") -> None:
        """Notes that a request has its session."""

    def prefilled(self, generation: "Generation") -> None:
        """Notes that a slice of its prompt was computed."""

    def stepped(self, generations: "Iterable[Generation]", now_s: float) -> None:
        """Notes a decode step, by which each of these has its next token."""

    def ended(self, generation: "Generation") -> None:
        """Notes that a request is closed."""

    def sliced(self, done: Slice, seconds: float) -> None:
        """Notes that a slice was computed."""

    def cache_replaced(self, cache: "PrefixCache") -> None:
        """Notes that this cache is about to be replaced."""
