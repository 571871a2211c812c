"""Gives an engine the sight of a model of mlx-vlm. Every process imports this module, which imports the rest of the
wing only for such a model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner.engine.parts import Examined, Facts, Parts, Wing
from runner.settings import CheckSettings

if TYPE_CHECKING:
    from runner.media.open import Sight


class VlmWing(Wing):
    """Pictures, for a model of mlx-vlm."""

    name = "vlm"

    def __init__(self) -> None:
        self._sight: Sight | None = None

    def facts(self, settings: CheckSettings, found: Examined | None) -> Mapping[str, Facts | None]:
        if found is None or found.model.family.library is None:
            return {}
        from runner.media.facts import PictureFacts
        from runner.vlm.source import VlmChoice

        why = VlmChoice.of(settings).blindness(found.model.config)
        tower = found.model.family.import_name
        return {"pictures": PictureFacts(sees=False, why=why) if why else PictureFacts(sees=True, tower=tower)}

    def load(self, parts: Parts) -> None:
        """Starts the processor. The tower was loaded with the model."""
        if parts.model.family.library is not None:
            from runner.vlm.sight import open_vlm_sight

            self._sight = open_vlm_sight(parts)

    def plug(self, parts: Parts) -> None:
        """Adds the sight to an engine, or the reason why the model has none."""
        if self._sight is not None:
            self._sight.plug(parts)
