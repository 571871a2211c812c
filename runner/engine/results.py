"""What a slice comes to: events for the clients of several requests."""

from typing import TypeAlias

from runner.engine.events import Event
from runner.engine.generation import Generation

Results: TypeAlias = list[tuple[Generation, list[Event]]]
"""Generations, each with the events for its client."""
