"""What a slice comes to: events for the clients of several requests."""

from typing import TypeAlias

from runner.engine.events import Event, Outbox
from runner.engine.generation import Generation

Results: TypeAlias = list[tuple[Generation, list[Event]]]
"""Generations, each with the events for its client."""


def tell(outbox: Outbox, results: Results) -> list[Generation]:
    """Delivers the events of each generation to its client. Returns the generations that are done."""
    done = []
    for generation, events in results:
        for event in events:
            outbox.put(generation.request.stream, event)
        if generation.done:
            done.append(generation)
    return done
