"""Builds an engine: first its world, then its parts. Called on the engine thread, which alone imports MLX."""

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
    """Returns the world for an engine with these settings, which can ask for the world of one wing at most. Raises
    RankError if the ranks cannot begin, and UsageError if nothing can be recorded."""
    for each in WINGS:
        if each.world and each.wanted(settings):
            return cast("World", each.find(each.world)(settings, model, outbox))
    return World(Turns(outbox))


def build_parts(
    settings: Settings, model: OpenedModel, opening: Future[Tokenizer], started_s: float, post: "Post", world: World
) -> "Parts":
    """Loads the model and builds an engine around it, by `runner.assemble.assemble`."""
    from runner.assemble import assemble

    return assemble(settings, model, opening, started_s, post, world)
