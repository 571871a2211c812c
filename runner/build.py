"""Builds an engine: the world that its values come from, then its parts. Both import what the settings need, no more.

Called on the engine thread, which alone imports MLX; `routes` is for the event loop.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from runner.engine.engine import Assemble, Engine, Turns
from runner.engine.events import Outbox
from runner.model import OpenedModel
from runner.settings import Settings

if TYPE_CHECKING:
    from aiohttp.web import RouteDef

    from runner.engine.parts import World


def open_world(settings: Settings, model: OpenedModel, outbox: Outbox) -> "tuple[World, Turns]":
    """Returns the world of an engine with these settings, and its turns. Raises RankError if the ranks cannot begin,
    and UsageError if there can be no recording."""
    from runner.engine.parts import World

    world, turns = World(), Turns(outbox)
    if settings.ranks > 1:
        from runner.ranks.start import lead

        world, turns = lead(settings, model, turns.outbox)
    if settings.record is not None:
        from runner.tape.recording import start_recording

        world, turns = start_recording(settings.record, settings, model, turns.outbox)
    return world, turns


def assembler() -> Assemble:
    """Returns the function that loads a model and builds the parts of an engine around it."""
    from runner.assemble import assemble

    return assemble


def routes(engine: Engine, helper: Executor) -> "Iterator[RouteDef]":
    """Yields the routes that wings add to those of the server."""
    from runner.numbers.endpoints import StatsEndpoints

    yield from StatsEndpoints(engine, helper).routes
    yield from ()  # without any wing, too
