"""The sight of a model, or its absence. Imported by every process; what pictures need is imported with a tower."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from protocol import Media
from runner.errors import RequestError

if TYPE_CHECKING:
    from runner.pictures.encoder import PictureEncoder
    from runner.pictures.families.family import Family
    from runner.pictures.pixels import PixelStore
    from runner.pictures.prompt import PictureNames


class PictureSupport(NamedTuple):
    """A model that sees. Any thread may use it."""

    family: "Family"
    start: int
    soft: int
    end: int
    """The ids around and in the place of a picture's soft tokens."""
    names: "PictureNames"
    pixels: "PixelStore"


class NoPictures(NamedTuple):
    """A model that sees nothing, and why, if it is not simply a text model."""

    why: str = ""


class Sight(NamedTuple):
    """The parts that a model sees with: one for any thread, one for the engine thread."""

    support: PictureSupport | NoPictures = NoPictures()
    encoder: "PictureEncoder | None" = None

    @property
    def nbytes(self) -> int:
        """The bytes of decoded pictures, and of what decodes one at present. Any thread may ask."""
        return self.support.pixels.nbytes if isinstance(self.support, PictureSupport) else 0

    def bound(self, room_bytes: int) -> None:
        """Refuses pictures that take more than `room_bytes` to decode."""
        if isinstance(self.support, PictureSupport):
            self.support.pixels.room_bytes = room_bytes

    def drop_features(self) -> None:
        """Frees what pictures take: features that are kept for later prompts, and pixels that no tower reads yet."""
        if isinstance(self.support, PictureSupport):
            self.support.pixels.give_way()
        if self.encoder is not None:
            self.encoder.clear()


def refuse_media(media: Sequence[Media], pictures: PictureSupport | NoPictures) -> None:
    """Raises RequestError if there are media, but no model to see them."""
    if media and isinstance(pictures, NoPictures):
        why = f": {pictures.why}" if pictures.why else ""
        raise RequestError(f"this model does not support {media[0].kind or 'media'} input{why}")
