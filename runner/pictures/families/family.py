"""The interface of all families of models that see."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, Self, cast

from runner.errors import MediaError, ModelError
from runner.pictures.alpha import Alpha
from runner.pictures.geometry import Geometry

if TYPE_CHECKING:
    from runner.pictures.geometry import Pixels


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


# --- Reads the numbers of config.json and preprocessor_config.json that decide how pictures are prepared.

Config = Mapping[str, object]

LARGEST = 1 << 24
"""No honest size or count of these files is larger; sizes of pictures stay far from overflows."""


def section(config: Config, name: str) -> Config:
    """Returns the object `name` of `config`, {} if there is none. Raises ModelError if it is something else."""
    found = config.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ModelError(f"config.json: {name}: want an object, found {type(found).__name__}")
    return cast("Config", found)


def count(default: int | None, *places: tuple[Config, str]) -> int:
    """Returns the first positive integer among `places`, pairs of an object and a key; else `default`.

    Missing fields, nulls and zeros stand for defaults, as in Ollama's runner. Raises ModelError for anything else that
    is no integer between 1 and LARGEST, and if there is no default.
    """
    for place, name in places:
        found = place.get(name)
        if found is None or found == 0:
            continue
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found <= LARGEST:
            raise ModelError(f"config.json: {name}: want a positive integer, found {found!r}")
        return found
    if default is None:
        raise ModelError(f"config.json: {' or '.join(name for _, name in places)}: missing")
    return default


def token(config: Config, *names: str) -> int | None:
    """Returns the first token id among the fields `names`, None if all are missing. Raises ModelError for nonsense."""
    for name in names:
        found = config.get(name)
        if found is None:
            continue
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise ModelError(f"config.json: {name}: want the id of a token, found {found!r}")
        return found
    return None


def required_token(config: Config, *names: str) -> int:
    """Returns the first token id among the fields `names`. Raises ModelError for nonsense and if all are missing."""
    found = token(config, *names)
    if found is None:
        raise ModelError(f"config.json: {' or '.join(names)}: missing")
    return found


def text(config: Config, name: str, default: str) -> str:
    """Returns the text of a field, `default` if it is missing or blank. Raises ModelError for anything else."""
    found = config.get(name)
    if found is None:
        return default
    if not isinstance(found, str):
        raise ModelError(f"config.json: {name}: want a text, found {found!r}")
    return found if found.strip() else default


# --- Cuts pixels into patches, one row of values for each.

CHANNELS = 3

CHANNEL_Y_X = (6, 2, 5)
Y_X_CHANNEL = (2, 5, 6)
"""Orders of the values of one patch, as axes of the array that `cut` makes."""


def cut(pixels: "Pixels", patch: int, order: tuple[int, int, int], merge: int = 1) -> "Pixels":
    """Returns the patches of `pixels` (uint8 [height, width, 3]) as rows: uint8 [count, patch * patch * 3].

    Rows follow the picture from left to right and top to bottom, or with `merge` above 1 in blocks of
    `merge` x `merge` patches: the blocks from left to right and top to bottom, and so the patches of each.
    """
    height, width, channels = pixels.shape
    side = patch * merge
    if channels != CHANNELS or height % side or width % side:
        raise ValueError(f"want sides of {side} pixels and {CHANNELS} channels, found {pixels.shape}")
    split = pixels.reshape(height // side, merge, patch, width // side, merge, patch, channels)
    return split.transpose(0, 3, 1, 4, *order).reshape(-1, patch * patch * channels)
