"""Decodes JSON as Go's encoding/json does: hosts rely on everything that Go accepts.

Only the first JSON value of a body is read. Keys match in any case, and unknown keys are ignored. If a key appears
twice, the second value replaces the first one, but a second object adds its members to the first one. Null empties a
list or a Raw, and changes no other field. A value of the wrong type makes the whole body invalid. Bytes that are not
UTF-8 and halves of surrogate pairs become U+FFFD. Bytes are in base64, which may contain line ends.

Three things differ from Go: values nested deeper than Python's recursion limit (about 1000; Go's is 10000) are refused;
known objects and lists of many thousands of values are refused; and a list that appears twice replaces the first one.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from ctypes import c_float
from functools import cache
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
from typing import Annotated, TypeVar, get_args, get_origin

import msgspec

from protocol.base64_text import Base64Text
from protocol.refusal import SHOWN_CHARACTERS, BadRequestError, misfit, no_json

StructT = TypeVar("StructT", bound=msgspec.Struct)
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_MOST = 3.4028234663852886e38
Float32 = Annotated[float, msgspec.Meta(ge=-_MOST, le=_MOST)]

_MOST_VALUES = 1 << 14
"""The most members of the body, and of each value of a known key. Decoding a member takes some microseconds."""
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"')
_SPACE = re.compile(r"[ \t\r\n]*+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_DIGITS = 40  # more digits than the largest float32 has
_MOST_STRANGERS = 16


class _Object:
    """A JSON object as the list of its members, in order. A key may appear more than once."""

    def __init__(self, members: list[tuple[str, object]]) -> None:
        self.members = members


def decode(
    body: bytes,
    wanted: type[StructT],
    strangers: list[str] | None = None,
    place: Callable[[int], int] = lambda at: at,
) -> StructT:
    """Returns the first JSON value of `body` as a `wanted`. Raises BadRequestError if it is not such a struct.

    Adds the first 16 unknown keys, cut if long, to `strangers`. `place` maps a position in `body` to one in the
    client's body.
    """
    text = body.decode(errors="surrogateescape")
    found: list[str] = [] if strangers is None else strangers
    try:
        return msgspec.convert(_merged({}, _top_level(text, wanted), wanted, "", found), wanted)
    except json.JSONDecodeError as error:
        at = len(text[: error.pos].encode(errors="surrogateescape"))
        refusal = no_json(error.msg, text, error.pos, place(at))
    except RecursionError:
        refusal = BadRequestError("the body is nested too deep")
    except ValueError as error:
        refusal = BadRequestError(str(error))
    raise refusal  # not in a handler: there the error's context would keep the whole text in memory


def field(wanted: type[msgspec.Struct], key: bytes) -> msgspec.structs.FieldInfo | None:
    """Returns the field of `wanted` with this key, given as JSON between quotes; None for an unknown key."""
    try:
        name, _ = scanstring(f'{key.decode(errors="surrogateescape")}"', 0)
    except ValueError:
        return None
    return _fields(wanted).get(_folded(name))


def _top_level(text: str, wanted: type[msgspec.Struct]) -> Iterator[tuple[str, object]]:
    """Yields the members of the object at the start of `text`; the value of an unknown key is None."""
    at = _after_space(text, 0)
    if text.startswith("null", at):
        return
    if not text.startswith("{", at):
        found = text[at : at + SHOWN_CHARACTERS]
        raise ValueError(f"the body must be a JSON object, found {found}" if found else "the body is empty")
    at, comma, count = _after_space(text, at + 1), False, 0
    while comma or text[at : at + 1] != "}":
        count = _refuse_vast(count + 1)
        key, at = scanstring(text, _expect('"', text, at, "a key in double quotes"))
        at = _after_space(text, _expect(":", text, _after_space(text, at)))
        field = _fields(wanted).get(_folded(key))
        value, end = _skipper.raw_decode(text, at)
        if field is None:
            yield key, None
        elif field.type is msgspec.Raw and value is not None:
            yield key, msgspec.Raw(clean(text[at:end]).encode())
        else:
            _refuse_vast(_separators(text, at, end))
            value, end = _parser.raw_decode(text, at)
            yield key, value
        at = _after_space(text, end)
        comma = text[at : at + 1] == ","
        at = _after_space(text, at + 1) if comma else _expect("}", text, at, "',' or '}'") - 1


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _expect(wanted: str, text: str, at: int, words: str = "") -> int:
    if text[at : at + 1] != wanted:
        raise json.JSONDecodeError(f"Expecting {words or repr(wanted)}", text, at)
    return at + 1


def _merged(
    into: dict[str, object],
    members: Iterable[tuple[str, object]],
    wanted: type[msgspec.Struct],
    place: str,
    strangers: list[str],
) -> dict[str, object]:
    """Stores the value of each member in `into`, under the name of its field of `wanted`, and returns `into`. `place`
    is the path before the names of fields, in error messages and in `strangers`."""
    for key, value in members:
        field = _fields(wanted).get(_folded(key))
        if field is None:
            if len(strangers) < _MOST_STRANGERS:
                strangers.append(place + key[:SHOWN_CHARACTERS])
            continue
        name = field.encode_name
        if value is not None:
            into[name] = _stored(value, field.type, into.get(name), place + name, strangers)
        elif field.type is msgspec.Raw or get_origin(field.type) is list:
            into.pop(name, None)
    return into


def _stored(value: object, wanted: type, before: object, place: str, strangers: list[str]) -> object:
    """Returns `value` as the type `wanted`; adds an object to the earlier value `before`. Raises BadRequestError."""
    if isinstance(value, _Object) and isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        members = before if isinstance(before, dict) else {}
        return _merged(members, value.members, wanted, f"{place}.", strangers)
    if isinstance(value, list) and get_origin(wanted) is list:
        (item,) = get_args(wanted)
        return [
            item() if element is None else _stored(element, item, None, f"{place}[{number}]", strangers)
            for number, element in enumerate(value)
        ]
    if isinstance(value, str) and wanted is bytes:
        data = Base64Text(place)
        data.take(value)
        return data.finish()
    stored = clean(value) if isinstance(value, str) else value
    if wanted is Float32 and type(value) in (int, float):
        stored = c_float(value).value  # type: ignore[arg-type]  # here `value` is a number
    try:
        return msgspec.convert(stored, wanted)
    except msgspec.ValidationError:
        raise misfit(place, value, wanted) from None


def clean(text: str) -> str:
    """Replaces halves of surrogate pairs by U+FFFD. Bytes that are not UTF-8 were decoded to such halves."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return _SURROGATE.sub("\ufffd", text)
    return text


@cache
def _fields(wanted: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {_folded(field.encode_name): field for field in msgspec.structs.fields(wanted)}


def _folded(key: str) -> str:
    """Returns the key in lower case. As in Go, the long s becomes `s`, and the Kelvin sign becomes `k` (by `lower`)."""
    return key.lower().replace("\u017f", "s")


def _separators(text: str, at: int, end: int) -> int:
    """Counts the commas of the list or object in `text[at:end]`. If there are many, leaves out those in strings."""
    count = text.count(",", at, end) if text[at] in "[{" else 0
    return count if count <= _MOST_VALUES else _STRING.sub("", text[at:end]).count(",")


def _refuse_vast(count: int) -> int:
    if count > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES} values")
    return count


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


_parser = json.JSONDecoder(object_pairs_hook=_Object, parse_int=_integer, parse_constant=_refuse)
_skipper = json.JSONDecoder(object_pairs_hook=len, parse_int=len, parse_float=len, parse_constant=_refuse)
"""Finds the end of a JSON value. It takes half the memory of `_parser`, and calls no Python function for an object."""
