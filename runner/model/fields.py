"""Reads fields of `config.json`, and of files beside it, that describe a part of a model.

A field that is missing, null or zero has the value `default`, as in Go; without a `default` the field is required.
Every function raises ModelError for a value of the wrong type or out of range.
"""

import sys
from collections.abc import Mapping, Sequence

from runner.errors import ModelError, UnknownError

Config = Mapping[str, object]
_MOST = 1 << 20
"""A limit above every width and count of a real model."""
_MOST_SMALL = 1024
"""A limit above the number of layers in any real model, and above the side of any patch or window."""
_MOST_FIRST = 1 << 24
"""A limit above every real limit of pixels, patches or tokens. It keeps sizes of pictures far from overflows."""


def _senseless(key: str, wanted: str, found: object) -> ModelError:
    return ModelError(f"config.json: {key}: want {wanted}, found {str(found)[:200]}")


def section(config: Config, key: str) -> Config:
    """Returns the object in the field `key`; {} if the field is missing."""
    found = config.get(key)
    if not isinstance(found, dict | None):
        raise _senseless(key, "an object", type(found).__name__)
    return found or {}


def size(config: Config, key: str, default: int | None = None, most: int = _MOST) -> int:
    """Returns the width or count in the field `key`, from 1 to `most`."""
    found = config.get(key) or default
    if type(found) is not int or not 0 < found <= most:
        raise _senseless(key, "a positive integer", repr(config.get(key)))
    return found


def small_count(config: Config, key: str, default: int | None = None) -> int:
    """Returns the count in the field `key`, from 1 to 1024: of layers, or of pixels or patches along a side."""
    found = size(config, key, default)
    if found > _MOST_SMALL:
        raise _senseless(key, f"at most {_MOST_SMALL}", found)
    return found


def first_size(default: int, *places: tuple[Config, str]) -> int:
    """Returns the first size that a field in `places` has; else `default`. A place is an object and a field's key."""
    return next((size(config, key, most=_MOST_FIRST) for config, key in places if config.get(key)), default)


def positive(config: Config, key: str, default: float | None = None) -> float:
    """Returns the positive finite number in the field `key`."""
    found = config.get(key) or default
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= sys.float_info.max:
        raise _senseless(key, "a positive number", repr(config.get(key)))
    return float(found)


def flag(config: Config, key: str) -> bool:
    """Returns the boolean in the field `key`; False if the field is missing."""
    found = config.get(key)
    if not isinstance(found, bool | None):
        raise _senseless(key, "true or false", repr(found))
    return bool(found)


def expect(config: Config, key: str, known: str) -> None:
    """Raises UnknownError if the field `key` has another value than `known`, the only supported value."""
    found = config.get(key)
    if found is not None and found != known:
        raise UnknownError(f"config.json: {key}: want {known!r}, found {found!r}")


def strings(config: Config, key: str, known: Sequence[str], default: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the list in the field `key`. It must be as long as `default`, and every entry must be one of `known`."""
    found = config.get(key)
    if found is None:
        return default
    if not isinstance(found, list) or len(found) != len(default) or not all(each in known for each in found):
        raise _senseless(key, f"{len(default)} of {' or '.join(known)}", found)
    return tuple(found)


def text(config: Config, key: str, default: str) -> str:
    """Returns the text in the field `key`; `default` if the field is missing or blank."""
    found = config.get(key)
    if not isinstance(found, str | None):
        raise _senseless(key, "a text", repr(found))
    return found if found and found.strip() else default


def token(config: Config, *keys: str) -> int | None:
    """Returns the token id in the first present field of `keys`; None if all fields are missing. Zero is a token id."""
    for key in keys:
        found = config.get(key)
        if found is not None:
            if type(found) is not int or found < 0:
                raise _senseless(key, "the id of a token", repr(found))
            return found
    return None


def required_token(config: Config, *keys: str) -> int:
    """Returns the token id in the first present field of `keys`. Raises ModelError if all fields are missing."""
    found = token(config, *keys)
    if found is None:
        raise ModelError(f"config.json: {' or '.join(keys)}: missing")
    return found
