"""Reads the model's text files for tokenizers."""

import re
from collections.abc import Callable, Mapping

from runner import json_files
from runner.errors import ModelError

Files = Callable[[str], bytes | None]
"""Maps the name of a file (`tokenizer.json`, ...) to its content, or to None if the model has no such file."""

JsonObject = Mapping[str, object]
_HALVES = re.compile("[\ud800-\udfff]")
"""Surrogates. `json` leaves single surrogates in a text, but UTF-8 has no form for them."""


def read_object(files: Files, name: str) -> JsonObject:
    """Reads an optional config file. Returns an empty object if the file is missing or empty. Raises ModelError, with
    the file's name, if the file has anything but a JSON object."""
    data = files(name)
    if not data:
        return {}
    try:
        value = json_files.parse(data)
    except ValueError as error:
        raise ModelError(f"parse tokenizer: {name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"parse tokenizer: {name}: expected an object, found {type(value).__name__}")
    return value


def token_text(value: object) -> str | None:
    """Returns the text of a token in a config: `value` itself or its `content`. Returns None if this is no string, is
    empty, or has a surrogate, which no prompt has."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text and not _HALVES.search(text) else None
