"""The interface of all families of models that see."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self

from runner.errors import MediaError
from runner.media.alpha import Alpha
from runner.media.geometry import Geometry

if TYPE_CHECKING:
    from runner.media.geometry import Pixels


class Around(NamedTuple):
    """The tokens that stand for a picture: `start`, then `soft` once for each soft token, then `end`.

    An integer is an id, from config.json; a text is a special token whose id the tokenizer knows.
    """

    start: int | str
    soft: int | str
    end: int | str


class Family(Protocol):
    """The preparation of pictures in one family of models. Frozen; made from the model's config."""

    name: ClassVar[str]
    """In keys of caches."""
    title: ClassVar[str]
    """In texts that hosts show: `qwen3.5 does not support audio input`."""
    version: ClassVar[int]
    """Of the preparation: another number for other rows from the same bytes and geometry."""
    alpha: ClassVar[Alpha]
    """The treatment of transparency by `decode`."""
    mrope: ClassVar[bool]
    """Positions have three channels: time, row and column."""

    @property
    def bidirectional(self) -> bool:
        """Soft tokens of one picture attend to each other in both directions, in sliding layers."""

    @property
    def splits(self) -> bool:
        """A prefill may end between two soft tokens of one picture."""

    @classmethod
    def from_config(cls, config: Mapping[str, object], preprocessor: Mapping[str, object]) -> Self:
        """Returns the preparation that config.json and preprocessor_config.json ({} if there is none) describe.

        Raises ModelError for fields that make no sense.
        """

    def geometry(self, width: int, height: int) -> Geometry:
        """Returns what becomes of a picture of `width` x `height` pixels. Raises MediaError if it cannot be used."""

    def patches(self, pixels: "Pixels", geometry: Geometry) -> "Pixels":
        """Returns the tower's rows, uint8 [rows * columns, values], of pixels of the size in `geometry`."""

    @staticmethod
    def around(config: Mapping[str, object]) -> Around:
        """Returns the tokens that stand for a picture. Raises ModelError if config.json lacks one, or for nonsense."""


def check_size(width: int, height: int) -> None:
    """Raises MediaError, in the words that hosts know, for pictures without pixels."""
    if width <= 0 or height <= 0:
        raise MediaError(f"invalid image size {width}x{height}")
