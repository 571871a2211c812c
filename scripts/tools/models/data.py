"""Reads tables (`*.toml`): configs of tiny models, and their published forms.

A table may be `like` others, whose fields it takes first, and `without` some of them. The text "null" is None, and
"@name" a copy of the table `name` of the same file.
"""

import copy
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

Table = dict[str, object]


def read(file: str, folder: Path = Path(__file__).parent, **numbers: object) -> dict[str, Table]:
    """Returns the tables of a file by their names. "$NAME" stands for the value of that name in `numbers`."""
    raw = tomllib.loads((folder / f"{file}.toml").read_text(encoding="utf-8"))
    return {name: _whole(name, raw, numbers) for name in raw}


def _whole(name: str, raw: Mapping[str, object], numbers: Mapping[str, object]) -> Table:
    table = dict(cast("Table", raw[name]))
    likes, without = table.pop("like", []), cast("Iterable[str]", table.pop("without", []))
    whole: Table = {}
    for like in [likes] if isinstance(likes, str) else cast("list[str]", likes):
        whole |= _whole(like, raw, numbers)
    kept = {key: value for key, value in whole.items() if key not in [*without]}
    return kept | {key: _value(value, raw, numbers) for key, value in table.items()}


def _value(value: object, raw: Mapping[str, object], numbers: Mapping[str, object]) -> object:
    if isinstance(value, dict):
        return {key: _value(each, raw, numbers) for key, each in value.items()}
    if isinstance(value, list):
        return [_value(each, raw, numbers) for each in value]
    if value == "null":
        return None
    if isinstance(value, str) and value.startswith("@"):
        return _whole(value[1:], raw, numbers)
    return copy.deepcopy(numbers[value[1:]]) if isinstance(value, str) and value.startswith("$") else value
