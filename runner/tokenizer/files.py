"""How a tokenizer gets at the model's files."""

import json
from collections.abc import Callable, Mapping

from runner.errors import ModelError

Files = Callable[[str], bytes | None]
"""A file's bytes by its name (`tokenizer.json`, ...), or None when the model has no such file."""

JsonObject = Mapping[str, object]


def read_object(files: Files, name: str) -> JsonObject:
    """Read an optional config file; what is not there is empty.

    Raises:
        ModelError: the file is not a JSON object; the text names it.
    """
    data = files(name)
    if not data:
        return {}
    try:
        value: object = json.loads(data)  # the standard parser, because configs written by Python hold `Infinity`
    except (ValueError, RecursionError) as error:
        raise ModelError(f"parse tokenizer: {name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"parse tokenizer: {name}: expected an object, found {type(value).__name__}")
    return value


def token_text(value: object) -> str | None:
    """A token as configs name it: its text, or an object with the text as `content`; None for anything else."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None
