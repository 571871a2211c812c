"""The preparation of sounds in each family of models that hear: their pieces, their rows, and the tokens around them.

Arithmetic alone, as in `families` for pictures.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from runner.errors import MediaError, ModelError
from runner.media.families import Around
from runner.media.sound_header import FRAME, HOP, LONGEST, RATE
from runner.model.fields import Config, required_token, section


class Clip(NamedTuple):
    """Everything about a prepared sound that its rows decide."""

    rows: tuple[int, ...]
    """Those of each piece."""
    tokens: int
    """Soft tokens in the text, of all pieces."""


@dataclass(frozen=True)
class SoundFamily(ABC):
    """The preparation of sounds in one family of models, made from the model's config."""

    name: ClassVar[str]
    """In keys of caches."""
    version: ClassVar[int] = 1
    """Of the preparation: another number for other rows from the same bytes."""
    frame_samples: int
    """The samples of a row; 0 where a row is a spectrum."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Config) -> Self:
        """Returns the preparation that config.json describes. Raises ModelError for fields that make no sense."""

    @abstractmethod
    def clip(self, samples: int) -> Clip | None:
        """Returns what `samples` samples at RATE become; None where that depends on the sound itself, too.

        Raises MediaError for too few.
        """

    @abstractmethod
    def clip_of(self, rows: Sequence[int]) -> Clip:
        """Returns the clip of pieces with these numbers of rows."""

    @staticmethod
    def around(config: Config) -> Around:
        """Returns the tokens that stand for a sound. Raises ModelError if config.json lacks one, or for nonsense."""
        return Around(
            required_token(config, "boa_token_id"),
            required_token(config, "audio_token_id"),
            required_token(config, "eoa_token_id", "eoa_token_index"),
        )


@dataclass(frozen=True)
class Gemma4Sound(SoundFamily):
    """Spectra, a hundred a second, of which four become one token. Pieces are at most 30 s long, cut where it is
    quiet."""

    name: ClassVar[str] = "gemma4"
    frame_samples: int = 0

    @classmethod
    def from_config(cls, config: Config) -> Self:
        del config
        return cls()

    def clip(self, samples: int) -> Clip | None:
        if samples > LONGEST:
            return None
        if samples <= FRAME - HOP:
            raise MediaError("audio too short")
        return self.clip_of([(samples + HOP - FRAME - 1) // HOP + 1])

    def clip_of(self, rows: Sequence[int]) -> Clip:
        return Clip(tuple(rows), sum(subsampled(count) for count in rows))


def subsampled(rows: int) -> int:
    """Returns how many rows are left of a piece after both convolutions, each of which takes every second one."""
    return -(-rows // 4)


_FRAME_SAMPLES = 640
_MOST_FRAME_SAMPLES = RATE


@dataclass(frozen=True)
class Gemma4UnifiedSound(SoundFamily):
    """Samples as they are, `frame_samples` to a token."""

    name: ClassVar[str] = "gemma4_unified"

    @classmethod
    def from_config(cls, config: Config) -> Self:
        found = section(config, "audio_config").get("audio_samples_per_token") or _FRAME_SAMPLES
        if type(found) is not int or not 0 < found <= _MOST_FRAME_SAMPLES:
            raise ModelError(f"invalid audio_samples_per_token {found}")
        return cls(found)

    def clip(self, samples: int) -> Clip:
        if not samples:
            raise MediaError("audio too short")
        return self.clip_of([-(-samples // self.frame_samples)])

    def clip_of(self, rows: Sequence[int]) -> Clip:
        return Clip(tuple(rows), sum(rows))
