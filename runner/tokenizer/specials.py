"""Which ids begin and end a text: three files have a say, the first that names one wins (`protocol.md` section 2.8)."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from runner.errors import ModelError
from runner.tokenizer.files import Files

JsonObject = Mapping[str, object]


class SpecialIds(NamedTuple):
    """The beginning and the ends of a text."""

    bos: int | None
    eos: frozenset[int]
    add_bos: bool


def resolve_special_ids(files: Files, added: Mapping[str, int]) -> SpecialIds:
    """Read BOS and EOS; `added` maps the text of every added token to its id.

    Ids come from `generation_config.json`, else `config.json` (top level), else the token texts of
    `tokenizer_config.json`. BOS and EOS are looked up apart from each other, and lists are never merged. A negative id
    means none.

    Raises:
        ModelError: one of the files is not a JSON object.
    """
    numbered = [_read_object(files, "generation_config.json"), _read_object(files, "config.json")]
    named = _read_object(files, "tokenizer_config.json")
    bos = _first_ids(numbered, "bos_token_id") or _named_id(named.get("bos_token"), added)
    eos = _first_ids(numbered, "eos_token_id") or _named_id(named.get("eos_token"), added)
    return SpecialIds(bos[0] if bos else None, frozenset(eos), bool(bos) and named.get("add_bos_token") is True)


def _read_object(files: Files, name: str) -> JsonObject:
    """Read an optional file. The standard parser, because configs written by Python hold `Infinity`."""
    data = files(name)
    if not data:
        return {}
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"parse tokenizer: {name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"parse tokenizer: {name}: expected an object, found {type(value).__name__}")
    return value


def _first_ids(sources: list[JsonObject], key: str) -> list[int]:
    return next((ids for source in sources if (ids := _ids(source.get(key)))), [])


def _ids(value: object) -> list[int]:
    """A whole number or a list of them; everything else counts as absent."""
    values = value if isinstance(value, list) else [value]
    numbers = [v for v in values if (type(v) is float and v.is_integer()) or type(v) is int]
    return [int(number) for number in numbers if number >= 0]


def _named_id(value: object, added: Mapping[str, int]) -> list[int]:
    """A token's text, or an object with the text as `content`; it must be an added token."""
    text = value.get("content") if isinstance(value, dict) else value
    return [added[text]] if isinstance(text, str) and text in added else []
