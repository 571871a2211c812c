"""Access to the model's text files, for tokenizers."""

import re
from collections.abc import Callable, Mapping

from runner import json_files
from runner.errors import ModelError

Files = Callable[[str], bytes | None]
"""Returns the content of a file by name (`tokenizer.json`, ...), or None if the model has no such file."""

JsonObject = Mapping[str, object]
_HALVES = re.compile("[\ud800-\udfff]")
"""Surrogates. `json` leaves single ones in a text, and they have no UTF-8."""


def read_object(files: Files, name: str) -> JsonObject:
    """Reads an optional config file; a missing file is an empty object. Raises ModelError for anything but a JSON
    object; the message names the file."""
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
    """Returns the text of a token in a config: a string, or an object with `content`; None for anything else, and for
    half a character, which no prompt has."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text and not _HALVES.search(text) else None
