"""The values in `config.json` of tiny models: one table by field name for all architectures, and the exceptions.

Hidden size 32, 4 layers, 64 tokens, windows of 32 tokens and chunks of 16, so that a prompt of 41 goes beyond both.
`values.toml` has them: a quantity has many names, and an architecture may have values of its own.
"""

from typing import cast

from scripts.tools.models import data

Values = dict[str, object]

_TABLES = data.read("values")
_NAMED = [row for rows in _TABLES["numbers"].values() for row in cast("list[tuple[object, str]]", rows)]
_SHARED: Values = {name: value for value, names in _NAMED for name in names.split()} | _TABLES["shared"]
VOCAB = cast("int", _SHARED["vocab_size"])


def values(name: str) -> Values:
    """Returns every field that the tiny configuration of an architecture may have."""
    return {"model_type": name, **_SHARED, **_TABLES.get(f"own-{name}", {})}
