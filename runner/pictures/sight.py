"""The sight of a model, or its absence. Imported by every process; what pictures need is imported with a tower."""

from typing import TYPE_CHECKING, NamedTuple

from runner.engine.request import NoVision, Vision

if TYPE_CHECKING:
    from runner.pictures.encoder import PictureEncoder
    from runner.pictures.prompt import PictureNames
    from runner.pictures.support import PictureSupport


class Sight(NamedTuple):
    """The parts that a model sees with: one for any thread, one for the engine thread. None if it sees nothing, for
    which `why` is the reason if it is not simply a text model."""

    support: "PictureSupport | None" = None
    encoder: "PictureEncoder | None" = None
    why: str = ""

    @property
    def vision(self) -> Vision:
        """What requests are prepared with."""
        return NoVision(self.why) if self.support is None else self.support

    @property
    def names(self) -> "PictureNames | None":
        """The names of pictures in the keys of caches."""
        return None if self.support is None else self.support.names

    @property
    def nbytes(self) -> int:
        """The bytes of decoded pictures, and of what decodes one at present. Any thread may ask."""
        return 0 if self.support is None else self.support.pixels.nbytes

    def bound(self, room_bytes: int) -> None:
        """Refuses pictures that take more than `room_bytes` to decode."""
        if self.support is not None:
            self.support.pixels.room_bytes = room_bytes

    def drop_features(self) -> None:
        """Frees what pictures take: features that are kept for later prompts, and pixels that no tower reads yet."""
        if self.support is not None:
            self.support.pixels.give_way()
        if self.encoder is not None:
            self.encoder.clear()
