"""The wings of a runner: capabilities beside the core, each in a folder of its own.

Other code knows wings only through this table: to remove a wing, delete its folder and its line here. Imports no MLX,
because a model is opened before MLX is imported.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.model.architectures import ChooseFamily, family_of
from runner.settings import CheckSettings, Settings

if TYPE_CHECKING:
    from aiohttp.web import RouteDef

    from runner.engine.engine import Engine
    from runner.engine.parts import Wing

Choices = Settings | CheckSettings


class Entry(NamedTuple):
    """A wing: its folder, and the names in it that other code uses, each written as `module:name`."""

    folder: str
    wing: str = ""
    """The class that joins an engine while it is built (`runner.engine.parts.Wing`)."""
    models: str = ""
    """The class that chooses the family of a model, for a wing that serves models of its own."""
    routes: str = ""
    """The class whose `routes` the server adds to its own routes."""
    world: str = ""
    """The function that opens a world for an engine, in place of the real machine."""
    wanted: Callable[[Any], bool] = lambda _: True
    """Returns True if the given settings need the wing."""

    def find(self, place: str) -> Any:
        """Imports the object at `place`, which is written as `module:name`."""
        module, _, name = place.partition(":")
        return getattr(import_module(f"runner.{self.folder}.{module}"), name)


WINGS = (
    Entry("numbers", "wing:NumbersWing", routes="endpoints:StatsEndpoints"),
    Entry("kv_bits", "wing:KvBitsWing", wanted=lambda settings: getattr(settings, "kv_bits", None) is not None),
    Entry("drafts", "wing:DraftsWing"),
    Entry("media", "wing:MediaWing"),
    Entry("vlm", "wing:VlmWing", models="source:VlmChoice"),
    Entry("grammar", "wing:GrammarWing"),
    Entry("embeddings", "wing:EmbeddingsWing"),
    Entry("disk", "wing:DiskWing", wanted=lambda settings: settings.disk_cache is not None),
    Entry("ranks", world="start:lead", wanted=lambda settings: settings.ranks > 1),
    Entry("tape", world="recording:start_recording", wanted=lambda settings: settings.record is not None),
)
"""All wings, in the order in which they load."""


def wings_of(settings: Choices) -> "Iterator[Wing]":
    """Yields the wings of an engine with these settings, in the order in which they load."""
    yield from (each.find(each.wing)() for each in WINGS if each.wing and each.wanted(settings))


def chooser(settings: Choices) -> ChooseFamily:
    """Returns the function that chooses the family of a model: a wing's, or else `family_of`."""
    choosers = (each.find(each.models).of(settings) for each in WINGS if each.models)
    return next(choosers, family_of)


def routes_of(engine: "Engine", helper: Executor) -> "Iterator[RouteDef]":
    """Yields the routes that wings add to the server's own. `helper` runs slow work outside the event loop."""
    for each in WINGS:
        if each.routes:
            yield from each.find(each.routes)(engine, helper).routes
