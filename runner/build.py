"""Builds an engine: the world that its values come from, then its parts. Both import what the settings need, no more.

Called on the engine thread, which alone imports MLX.
"""

from typing import TYPE_CHECKING

from runner.engine.engine import Assemble, Turns
from runner.engine.events import Outbox
from runner.model import OpenedModel
from runner.settings import Settings
from runner.wings import world_of

if TYPE_CHECKING:
    from runner.engine.parts import World


def open_world(settings: Settings, model: OpenedModel, outbox: Outbox) -> "tuple[World, Turns]":
    """Returns the world of an engine with these settings, and its turns. Raises RankError if the ranks cannot begin,
    and UsageError if there can be no recording."""
    opening = world_of(settings)
    if opening is not None:
        return opening(settings, model, outbox)
    from runner.engine.parts import World

    return World(), Turns(outbox)


def assembler() -> Assemble:
    """Returns the function that loads a model and builds the parts of an engine around it."""
    from runner.assemble import assemble

    return assemble
