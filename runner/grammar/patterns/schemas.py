"""Translates the regular expressions in the schemas of a format, which are in `pattern` and `patternProperties`.

A look-ahead or look-behind becomes a second pattern in an `allOf`. `patternProperties` cannot have a second one.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache

from protocol.format import Format
from runner.errors import RequestError
from runner.grammar.closed_objects import Schema, every_schema
from runner.grammar.explain_error import fault, inner_objects
from runner.grammar.patterns.parser import PatternError
from runner.grammar.patterns.translator import Translation, translated
from runner.grammar.rewriter import is_strict, with_changed_schemas
from runner.logs import printable

_ANY_NAME = "^(?s:.*)$"
_MOST_SHOWN = 100
_UNKNOWN = "Unable to determine if regex is empty"
"""A part of llguidance's error for several patterns that it cannot follow at the same time."""


def with_translated_patterns(wanted: Format) -> tuple[Format, str]:
    """Returns the format with its patterns in llguidance's dialect, and the first part of a pattern that is left out
    ("" if none is). Raises RequestError if a pattern is invalid, or if a part must be left out of a strict schema."""
    left_out: list[str] = []

    def translate(root: Schema) -> None:
        for schema in every_schema(root):
            try:
                found = [*_translated(schema)]
            except PatternError as error:
                raise RequestError(f"Format: {error} - at {_place(schema, root)}") from None
            if found and not left_out:
                left_out.append(f"{found[0]} - at {_place(schema, root)}")
            if found and is_strict(root):
                raise RequestError(f"Format: cannot enforce {left_out[0]}")

    return with_changed_schemas(wanted, translate), next(iter(left_out), "")


def _translated(schema: Schema) -> Iterator[str]:
    """Replaces the patterns of a schema by their translations. Yields each part that is left out."""
    if isinstance(pattern := schema.get("pattern"), str):
        found = _translation(pattern)
        yield from _left_out(found, pattern)
        _ask(schema, found.patterns)
    if isinstance(names := schema.get("patternProperties"), dict):
        translations = {name: _only_one(_translation(name)) for name in names}
        for name, each in translations.items():
            yield from _left_out(each, name)
        _ask_names(schema, names, translations)


def _ask(schema: Schema, patterns: tuple[str, ...]) -> None:
    """Replaces the `pattern` of a schema, so that a text must match each of `patterns`."""
    schema.pop("pattern")
    if len(patterns) == 1:
        schema["pattern"] = patterns[0]
    elif patterns:
        others = schema.get("allOf", [])
        schema["allOf"] = [*(others if isinstance(others, list) else ()), *({"pattern": each} for each in patterns)]


def _ask_names(schema: Schema, names: Mapping[str, object], translations: Mapping[str, Translation]) -> None:
    """Sets `patternProperties` to the translated patterns. One with a part left out matches further names, to which its
    schema must not apply. So it is kept only if the schema forbids all other names anyway."""
    inexact = any(each.left_out for each in translations.values())
    if inexact and (len(names) > 1 or schema.get("properties") or schema.get("additionalProperties") is not False):
        schema.pop("patternProperties")
        schema.pop("additionalProperties", None)
        return
    asked: dict[str, object] = {}
    for name, each in translations.items():
        pattern = each.patterns[0] if each.patterns else _ANY_NAME
        while pattern in asked:
            pattern += "(?:)"  # different patterns with equal translations must stay two keys
        asked[pattern] = names[name]
    schema["patternProperties"] = asked


def _only_one(found: Translation) -> Translation:
    """Returns the translation reduced to its last pattern."""
    if len(found.patterns) < 2:
        return found
    return Translation(found.patterns[-1:], ", ".join(filter(None, [found.left_out, "look-around"])))


@lru_cache(maxsize=256)
def _translation(pattern: str) -> Translation:
    try:
        found = translated(pattern)
    except PatternError as error:
        raise PatternError(f"the pattern {_shown(pattern)} is not a regular expression of ECMA-262: {error}") from None
    if len(found.patterns) > 1 and _UNKNOWN in fault({"allOf": [{"pattern": each} for each in found.patterns]}):
        return _only_one(found)
    return found


def _left_out(found: Translation, pattern: str) -> Iterator[str]:
    if found.left_out and found.patterns:
        yield f"{found.left_out} of the pattern {_shown(pattern)}"
    elif found.left_out:
        yield f"the pattern {_shown(pattern)}, which {found.left_out}"


def _place(schema: Schema, root: Schema) -> str:
    path = next(path for path, part in inner_objects(root, "$") if part is schema)
    return f"`{path}` of the JSON schema"


def _shown(pattern: str) -> str:
    shown = pattern if len(pattern) <= _MOST_SHOWN else f"{pattern[:_MOST_SHOWN]} ..."
    return printable(json.dumps(shown, ensure_ascii=False))
