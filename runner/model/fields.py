"""Reads the fields of `config.json`, and of files beside it, that describe a part of a model.

A missing field, null and zero stand for the default, as in Go; without a default the field is needed. Every function
raises ModelError for a senseless value.
"""

import sys
from collections.abc import Mapping, Sequence

from runner.errors import ModelError, UnknownError

Config = Mapping[str, object]
_MOST = 1 << 20
"""More than any width or count of a real part."""
_MOST_SMALL = 1024
"""More than a part has layers, or a patch or window has on a side."""
_MOST_FIRST = 1 << 24
"""More than any limit of pixels, patches or tokens; sizes of pictures stay far from overflows."""


def _senseless(key: str, wanted: str, found: object) -> ModelError:
    return ModelError(f"config.json: {key}: want {wanted}, found {str(found)[:200]}")


def section(config: Config, key: str) -> Config:
    """Returns the object `key`; {} if there is none."""
    found = config.get(key)
    if not isinstance(found, dict | None):
        raise _senseless(key, "an object", type(found).__name__)
    return found or {}


def size(config: Config, key: str, default: int | None = None, most: int = _MOST) -> int:
    """Returns a width or count, from 1 to `most`."""
    found = config.get(key) or default
    if type(found) is not int or not 0 < found <= most:
        raise _senseless(key, "a positive integer", repr(config.get(key)))
    return found


def small_count(config: Config, key: str, default: int | None = None) -> int:
    """Returns a number of layers, or of pixels or patches on a side, at most 1024."""
    found = size(config, key, default)
    if found > _MOST_SMALL:
        raise _senseless(key, f"at most {_MOST_SMALL}", found)
    return found


def first_size(default: int, *places: tuple[Config, str]) -> int:
    """Returns the first width, count or limit among `places`, pairs of an object and a key; else `default`."""
    return next((size(config, key, most=_MOST_FIRST) for config, key in places if config.get(key)), default)


def positive(config: Config, key: str, default: float | None = None) -> float:
    """Returns a positive finite number."""
    found = config.get(key) or default
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= sys.float_info.max:
        raise _senseless(key, "a positive number", repr(config.get(key)))
    return float(found)


def flag(config: Config, key: str) -> bool:
    """Returns true or false; false if it is missing."""
    found = config.get(key)
    if not isinstance(found, bool | None):
        raise _senseless(key, "true or false", repr(found))
    return bool(found)


def expect(config: Config, key: str, known: str) -> None:
    """Raises UnknownError for anything but the one choice `known` here."""
    found = config.get(key)
    if found is not None and found != known:
        raise UnknownError(f"config.json: {key}: want {known!r}, found {found!r}")


def strings(config: Config, key: str, known: Sequence[str], default: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a list of strings out of `known`, as long as `default`."""
    found = config.get(key)
    if found is None:
        return default
    if not isinstance(found, list) or len(found) != len(default) or not all(each in known for each in found):
        raise _senseless(key, f"{len(default)} of {' or '.join(known)}", found)
    return tuple(found)


def text(config: Config, key: str, default: str) -> str:
    """Returns a text; `default` for a blank one."""
    found = config.get(key)
    if not isinstance(found, str | None):
        raise _senseless(key, "a text", repr(found))
    return found if found and found.strip() else default


def token(config: Config, *keys: str) -> int | None:
    """Returns the first id of a token among these fields; None if all are missing. Zero is an id."""
    for key in keys:
        found = config.get(key)
        if found is not None:
            if type(found) is not int or found < 0:
                raise _senseless(key, "the id of a token", repr(found))
            return found
    return None


def required_token(config: Config, *keys: str) -> int:
    """Returns the first id of a token among these fields. Needs one."""
    found = token(config, *keys)
    if found is None:
        raise ModelError(f"config.json: {' or '.join(keys)}: missing")
    return found
