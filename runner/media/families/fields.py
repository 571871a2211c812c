"""Reads the numbers of config.json and preprocessor_config.json that decide how pictures are prepared."""

from collections.abc import Mapping
from typing import cast

from runner.errors import ModelError

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
