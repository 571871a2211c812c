"""Reads the fields of `config.json` that describe a tower."""

from collections.abc import Mapping

from runner.errors import ModelError

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
