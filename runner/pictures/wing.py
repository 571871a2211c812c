"""Gives an engine its pictures. Imported by every process; what pictures need is imported with a tower."""

from typing import TYPE_CHECKING

from runner.engine.parts import Parts, Wing

if TYPE_CHECKING:
    from runner.pictures.open import Sight


class PicturesWing(Wing):
    """Pictures, for a model that has a tower and stands in one process."""

    def __init__(self) -> None:
        self._sight: Sight | None = None

    def load(self, parts: Parts) -> None:
        """Loads the tower."""
        if parts.model.has_vision and parts.world.ranks is None:
            from runner.pictures.open import open_sight

            self._sight = open_sight(parts)

    def plug(self, parts: Parts) -> None:
        """Adds what is seen with, or the reason why nothing is."""
        sight = self._sight
        if sight is None:
            return
        parts.vision = sight.vision
        if sight.encoder is not None:
            parts.show = sight.encoder.begin
            parts.shifted = sight.encoder.shifted
            parts.counts.pictures = sight.encoder.counts
        if sight.support is not None:
            parts.names = sight.support.names
            if parts.shares_memory:
                sight.support.pixels.room_bytes = parts.free_bytes
        parts.helper_bytes.append(lambda: sight.nbytes)
        parts.drop_unused.append(sight.drop_features)
