"""Reads JSON that comes with a model. Anybody may have written it."""

import json
from collections.abc import Callable, Iterable

_DEEPEST = 100
"""The most levels of objects and lists: ten times as many as models have, a tenth of Python's own limit."""


def parse(
    data: bytes | str,
    *,
    hook: Callable[[dict[str, object]], object] | None = None,
    pairs_hook: Callable[[list[tuple[str, object]]], object] | None = None,
) -> object:
    """Returns the value in a file. Infinity and NaN are numbers, as Python writes them. The hooks are those of
    `json.loads`. Raises ValueError for text that is not JSON, or is nested too deep to work with."""
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
