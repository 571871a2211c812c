"""Builds an engine: the world that its values come from, then its parts. Both import what the settings need, no more.

Called on the engine thread, which alone imports MLX.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from runner.engine.engine import Assembly
from runner.engine.events import Outbox
from runner.model import OpenedModel
from runner.settings import Settings
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.engine.world import Turns, World


def open_world(settings: Settings, model: OpenedModel, outbox: Outbox) -> "tuple[World, Turns]":
    """Returns the world of an engine with these settings, and its turns. Raises RankError if the ranks cannot begin,
    and UsageError if there can be no recording."""
    from runner.engine.world import Turns, World

    world, turns = World(), Turns(outbox)
    if settings.ranks > 1:
        from runner.ranks.start import lead

        world, turns = lead(settings, model, turns.outbox)
    if settings.record is not None:
        from runner.tape.recording import start_recording

        world, turns = start_recording(settings.record, settings, model, turns.outbox)
    return world, turns


def assemble(
    settings: Settings,
    model: OpenedModel,
    opening: Future[Tokenizer],
    outbox: Outbox,
    started_s: float,
    post: Callable[[Callable[[], None] | None], None],
    world: "World",
) -> Assembly:
    """Loads the model and builds the parts of an engine, as `runner.assemble` does."""
    from runner.assemble import assemble

    return assemble(settings, model, opening, outbox, started_s, post, world)
