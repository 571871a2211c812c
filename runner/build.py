"""Builds an engine: the world that its values come from, then its parts. Each function imports what is needed.

Called on the engine thread, which alone imports MLX.
"""

from concurrent.futures import Future
from typing import TYPE_CHECKING, cast

from runner.engine.engine import Turns, World
from runner.engine.events import Outbox
from runner.model import OpenedModel
from runner.settings import Settings
from runner.tokenizer import Tokenizer
from runner.wings import WINGS

if TYPE_CHECKING:
    from runner.engine.parts import Parts, Post


def open_world(settings: Settings, model: OpenedModel, outbox: Outbox) -> World:
    """Returns the world of an engine with these settings, which want at most one of a wing. Raises RankError if the
    ranks cannot begin, and UsageError if there can be no recording."""
    for each in WINGS:
        if each.world and each.wanted(settings):
            return cast("World", each.find(each.world)(settings, model, outbox))
    return World(Turns(outbox))


def build_parts(
    settings: Settings, model: OpenedModel, opening: Future[Tokenizer], started_s: float, post: "Post", world: World
) -> "Parts":
    """Does what `runner.assemble.assemble` does."""
    from runner.assemble import assemble

    return assemble(settings, model, opening, started_s, post, world)
