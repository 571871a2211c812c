"""How a tokenizer gets at the model's files."""

from collections.abc import Callable

Files = Callable[[str], bytes | None]
"""A file's bytes by its name (`tokenizer.json`, ...), or None when the model has no such file."""
