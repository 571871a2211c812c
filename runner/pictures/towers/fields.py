"""Reads the fields of `config.json` that describe a tower."""

import math
from collections.abc import Mapping

from runner.errors import ModelError, UnknownError

_TEXT = ("text_config", "llm_config")
_MOST = 1 << 20
"""More than any width or count of a real tower."""


def part_of(config: Mapping[str, object], key: str = "vision_config") -> Mapping[str, object]:
    """Returns an object of `config.json`. Raises ModelError if there is none."""
    part = config.get(key)
    if not isinstance(part, dict):
        raise ModelError(f"config.json: {key} must be an object, found {part!r}")
    return part


def size(part: Mapping[str, object], key: str, default: int | None = None) -> int:
    """Returns a width or count, at least 1. Zero stands for the default, as in Go. Raises ModelError if unknown."""
    found = part.get(key) or default
    if type(found) is not int or not 0 < found <= _MOST:
        raise ModelError(f"config.json: a vision tower needs a positive {key}, found {part.get(key)!r}")
    return found


def text_width(config: Mapping[str, object]) -> int:
    """Returns the width of the text model that a tower's features go into."""
    text = next((part for key in _TEXT if isinstance(part := config.get(key), dict)), config)
    return size(text, "hidden_size")


def head_width(width: int, heads: int, multiple: int = 1) -> int:
    """Returns the width of one head. Raises ModelError unless heads of a multiple of `multiple` make up `width`."""
    if width % (heads * multiple):
        raise ModelError(
            f"config.json: a vision tower's width ({width}) must be divisible by its {heads} heads"
            + (f" times {multiple}" if multiple > 1 else "")
        )
    return width // heads


# --- Reads the fields of `config.json` that choose how a tower computes.

_MOST_FEW = 1024
"""More than a tower has layers, or a patch or window has on a side."""


def few(part: Mapping[str, object], key: str, default: int | None = None) -> int:
    """Returns a number of layers, or of pixels or patches on a side. Raises ModelError unless it is from 1 to 1024."""
    found = size(part, key, default)
    if found > _MOST_FEW:
        raise ModelError(f"config.json: a vision tower's {key} must be at most {_MOST_FEW}, found {found}")
    return found


def real(part: Mapping[str, object], key: str, default: float | None = None) -> float:
    """Returns a positive finite number. Zero stands for the default, as in Go. Raises ModelError for anything else."""
    found = part.get(key) or default
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ModelError(f"config.json: a vision tower's {key} must be a positive number, found {part.get(key)!r}")
    return float(found)


def flag(part: Mapping[str, object], key: str) -> bool:
    """Returns true or false; false if it is missing. Raises ModelError for anything else."""
    found = part.get(key)
    if not isinstance(found, bool | None):
        raise ModelError(f"config.json: a vision tower's {key} must be true or false, found {found!r}")
    return bool(found)


def only(part: Mapping[str, object], key: str, known: str) -> None:
    """Raises ModelError if a field is there and is not what a tower can do."""
    found = part.get(key)
    if found is not None and found != known:
        raise UnknownError(f"config.json: this vision tower needs {key} {known!r}, found {found!r}")


def words(part: Mapping[str, object], key: str, known: tuple[str, ...], default: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a list of words out of `known`, as long as `default`. Raises ModelError for any other value."""
    found = part.get(key)
    if found is None:
        return default
    if not isinstance(found, list) or len(found) != len(default) or not all(each in known for each in found):
        wanted = f"{len(default)} of {' or '.join(known)}"
        raise ModelError(f"config.json: a vision tower's {key} must be {wanted}, found {str(found)[:200]}")
    return tuple(found)


def rope_theta(part: Mapping[str, object], default: float) -> float:
    """Returns `rope_theta` out of `rope_parameters`."""
    found = part.get("rope_parameters")
    if not isinstance(found, dict | None):
        raise ModelError(f"config.json: a vision tower's rope_parameters must be an object, found {found!r}")
    return real(found or {}, "rope_theta", default)


def kind_of(config: Mapping[str, object]) -> object:
    """Returns the `model_type` of the `vision_config` in a whole `config.json`; None if it has none."""
    vision = config.get("vision_config")
    return vision.get("model_type") if isinstance(vision, dict) else None
