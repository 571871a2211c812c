"""Error messages for the author of a format that does not compile."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from time import process_time

import msgspec
from llguidance import LLMatcher

from protocol.format import Format, Lark, schemas
from runner.errors import RequestError, panics_as

_POSITION = re.compile(r"^at \d+\(\d+\): ")  # a position in generated text, which the author has never seen
_PANIC = "panic: "  # how llguidance reports a panic that it has caught
_PANICKED = "llguidance failed: {}; make the format smaller, or write equal alternatives only once"
_SCHEMA = "failed to compile JSON schema: "
_MOST_LOOKS_S = 0.5  # the processor time for finding the place of a fault
_MOST_CHARACTERS = 1000
_UNSUPPORTED = (
    "Unimplemented",
    "Unknown format",
    "constraints are not supported",
    "Failed to generate regex for",
    "has too many digits",
    "only supported when",
    "are not disjoint",
    "is not supported",  # look-ahead or look-behind in a pattern
    "backreferences",
    "unrecognized escape sequence",
    "nested parentheses",  # in a pattern, or for a bound of a hundred digits
)


def explain_error(error: str, wanted: Format) -> str:
    """Returns a message made of llguidance's `error` about `wanted`, with the place of the fault if that is found."""
    if error.startswith(_PANIC):
        return _PANICKED.format(_clipped(error.removeprefix(_PANIC).strip()))
    if isinstance(wanted, Lark):
        return _clipped(error.strip())
    first, *rest = _POSITION.sub("", error.strip()).splitlines()
    details = [line.strip() for line in rest if line.startswith("error: ")]
    if first.startswith(_SCHEMA):
        return _of_schema(first.removeprefix(_SCHEMA), details, wanted)
    return _clipped(" ".join([first, *details]))


def is_unsupported(error: str) -> bool:
    """Returns True if `error` is about a part of a schema that llguidance cannot enforce, but can leave out."""
    return any(word in error for word in _UNSUPPORTED)


def _of_schema(reason: str, details: Sequence[str], wanted: Format) -> str:
    told = _clipped(" ".join([reason, *details]))
    places = (_place(msgspec.json.decode(schema.json_schema), reason) for schema in schemas(wanted))
    place = next((each for each in places if each is not None), None)
    return f"JSON schema: {told}" if place is None else f"{told} - at `{place}` of the JSON schema"


def _place(schema: object, reason: str) -> str | None:
    """Returns the path of the innermost part of `schema` that alone fails for this reason; None if no part does. (A
    part with references fails for another reason when it is compiled alone.)"""
    found = None
    until = process_time() + _MOST_LOOKS_S
    for path, part in inner_objects(schema, "$"):
        if process_time() > until:
            break
        if (found is None or path.startswith(found)) and fault(part).partition("\n")[0] == reason:
            found = path
    return found


def inner_objects(value: object, path: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields each JSON object in `value` with its path, outer objects first. `path` is the path of `value`."""
    if isinstance(value, dict):
        yield path, value
        for key, each in value.items():
            yield from inner_objects(each, f"{path}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from inner_objects(each, f"{path}[{index}]")


def fault(schema: dict[str, object]) -> str:
    """Returns the reason why llguidance refuses a schema; "" for a schema that it accepts."""
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return _POSITION.sub("", error).removeprefix(_SCHEMA)


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def panics_as_errors() -> AbstractContextManager[None]:
    """Returns a context in which a panic of llguidance raises RequestError."""
    return panics_as(lambda why: RequestError(f"Format: {_PANICKED.format(why)}"))
