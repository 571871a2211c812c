"""Gives an engine its media. Every process imports this module, whose methods import the rest of the wing."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from runner.engine.parts import Examined, Facts, Parts, Wing
from runner.model import OpenedModel
from runner.model.sources.checkpoint import LogicalTensor
from runner.settings import CheckSettings

if TYPE_CHECKING:
    from runner.media.open import Sight


class MediaWing(Wing):
    """Pictures and sound, for a model that has towers and runs in one process, without other ranks."""

    name = "media"

    def __init__(self) -> None:
        self._sight: Sight | None = None

    def tensors(self, model: OpenedModel) -> Iterable[LogicalTensor]:
        from runner.media.towers import plan_sound_tower, plan_tower

        plans = (plan_tower(model), plan_sound_tower(model))
        return [each for plan in plans if plan is not None and plan.nbytes for each in plan.opened.tensors.values()]

    def facts(self, settings: CheckSettings, found: Examined | None) -> Mapping[str, Facts | None]:
        from runner.media.facts import picture_facts, sound_facts

        if found is None:
            return {}
        return {"pictures": picture_facts(settings, found), "sound": sound_facts(settings, found)}

    def load(self, parts: Parts) -> None:
        if parts.ranks is not None:
            return
        if parts.model.family.library is None and (parts.model.has_vision or parts.model.has_audio):
            from runner.media.open import open_sight

            self._sight = open_sight(parts)

    def plug(self, parts: Parts) -> None:
        """Adds the sight to an engine, or the reason why the model has none."""
        if self._sight is not None:
            self._sight.plug(parts)
