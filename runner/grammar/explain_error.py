"""Explains to the author of a format why it does not compile."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from time import process_time

import msgspec
from llguidance import LLMatcher

from protocol.format import Format, Lark, schemas
from runner.errors import RequestError, panics_as

_POSITION = re.compile(r"^at \d+\(\d+\): ")  # in generated text, which the author has never seen
_PANIC = "panic: "  # llguidance catches its own panics
_SCHEMA = "failed to compile JSON schema: "
_MOST_LOOKS_S = 0.5  # of processor time
_MOST_CHARACTERS = 1000
_UNSUPPORTED = (
    "Unimplemented",
    "Unknown format",
    "constraints are not supported",
    "Failed to generate regex for",
    "has too many digits",
    "only supported when",
    "are not disjoint",
    "is not supported",  # look-around in a pattern
    "backreferences",
    "unrecognized escape sequence",
    "nested parentheses",  # a pattern, or a bound of a hundred digits
)


def explain_error(error: str, wanted: Format) -> str:
    """Returns llguidance's reason why `wanted` does not compile, with the place of the fault if it is found."""
    if isinstance(wanted, Lark):
        return _clipped(error.strip())
    first, *rest = _POSITION.sub("", error.strip()).splitlines()
    if first.startswith(_PANIC):
        return _clipped(f"too large or too complex to compile ({first.removeprefix(_PANIC)})")
    details = [line.strip() for line in rest if line.startswith("error: ")]
    if first.startswith(_SCHEMA):
        return _of_schema(first.removeprefix(_SCHEMA), details, wanted)
    return _clipped(" ".join([first, *details]))


def is_unsupported(error: str) -> bool:
    """Returns True if llguidance cannot enforce a part of a schema, but can leave it out."""
    return any(word in error for word in _UNSUPPORTED)


def _of_schema(reason: str, details: Sequence[str], wanted: Format) -> str:
    told = _clipped(" ".join([reason, *details]))
    places = (_place(msgspec.json.decode(schema.json_schema), reason) for schema in schemas(wanted))
    place = next((each for each in places if each is not None), None)
    return f"JSON schema: {told}" if place is None else f"{told} - at `{place}` of the JSON schema"


def _place(schema: object, reason: str) -> str | None:
    """Returns the path of the innermost part of `schema` that fails by itself for this reason, or None. A part that
    refers to other parts fails for another reason when it is checked alone."""
    found = None
    until = process_time() + _MOST_LOOKS_S
    for path, part in inner_objects(schema, "$"):
        if process_time() > until:
            break
        if (found is None or path.startswith(found)) and fault(part).partition("\n")[0] == reason:
            found = path
    return found


def inner_objects(value: object, path: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields all objects with their paths, outer ones first."""
    if isinstance(value, dict):
        yield path, value
        for key, each in value.items():
            yield from inner_objects(each, f"{path}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from inner_objects(each, f"{path}[{index}]")


def fault(schema: dict[str, object]) -> str:
    """Returns why llguidance refuses a schema; empty if it does not."""
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return _POSITION.sub("", error).removeprefix(_SCHEMA)


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def panics_as_errors() -> AbstractContextManager[None]:
    """Raises RequestError in place of a panic inside the block."""
    return panics_as(lambda why: RequestError(f"Format: llguidance failed: {why}; write the format differently"))
