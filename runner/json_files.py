"""Reads the JSON files of a model, which anybody may have written."""

import json
from collections.abc import Callable, Iterable

_DEEPEST = 100
"""The most levels of objects and lists in a file: ten times as many as in real models, a tenth of Python's limit."""


def parse(
    data: bytes | str,
    *,
    hook: Callable[[dict[str, object]], object] | None = None,
    pairs_hook: Callable[[list[tuple[str, object]]], object] | None = None,
) -> object:
    """Returns the value that `data` encodes. Infinity and NaN are allowed, as Python writes them. The hooks are those
    of `json.loads`. Raises ValueError if `data` is not JSON or is nested too deep."""
    try:
        value: object = json.loads(data, object_hook=hook, object_pairs_hook=pairs_hook)
    except RecursionError:
        raise _too_deep() from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [part for each in level for part in _parts(each) if isinstance(part, dict | list)]
        if not level:
            return value
    raise _too_deep()


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> ValueError:
    return ValueError(f"objects and lists are nested deeper than {_DEEPEST}")
