"""Error messages about invalid bodies, for their authors: the field, the expected value, and the value found.

Messages are short: they repeat at most some characters of the body.
"""

import json
import re
from types import UnionType
from typing import Annotated, TypeVar, Union, get_args, get_origin

import msgspec

Value = TypeVar("Value")
SHOWN_CHARACTERS = 40
_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "bytes": "a string in base64",
    "array": "a list",
    "object": "an object",
}
"""Name of a type in msgspec's messages -> words for people."""
_BOUNDED = {int: " of 64 bits at most", float: " of at most 3.4e38"}
_WRAPPERS = (Annotated, Union, UnionType)
_EXPECTED = re.compile(r"Expected (.*?)(?:, got (.*))?")
_MALFORMED = re.compile(r"JSON is malformed: (.*) \(byte (\d+)\)")


class BadRequestError(ValueError):
    """The body is not a valid request. The message is the reason; the response puts `Bad Request: ` before it."""


def misfit(place: str, value: object, wanted: type | UnionType) -> BadRequestError:
    """Returns the error for a value at the path `place` whose type is not `wanted`, or that is out of bounds."""
    plain = wanted
    while get_origin(plain) in _WRAPPERS:
        plain = get_args(plain)[0]  # the type comes first, before its bounds or `None`
    words = _WORDS.get(getattr(plain, "__name__", ""), _WORDS["object"])
    if get_origin(plain) is list:
        words = 'a list of strings, such as ["x"]' if get_args(plain)[0] is str else "a list of objects"
    elif type(value) is plain or (plain is float and type(value) is int):
        words += _BOUNDED.get(plain, "")
    return BadRequestError(f"{place} must be {words}, found {shown(value)}")


def shown(value: object) -> str:
    """Returns the beginning of a JSON value for a message. A list or an object is only named as such."""
    if isinstance(value, str):
        text = json.dumps(value[:SHOWN_CHARACTERS], ensure_ascii=False)
        return text if len(value) <= SHOWN_CHARACTERS else f"{text}..."
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return "a list" if isinstance(value, list) else "an object"


def no_json(why: str, text: str, at: int, byte: int) -> BadRequestError:
    """Returns the error for a `text` that is invalid JSON from character `at` on, which is this byte of the body."""
    why = why.strip(": ").removesuffix(" at").removesuffix(" starting")
    if why.startswith("Expecting"):
        why = f"{why.removesuffix(' delimiter')}, found {_begun(text[at : at + SHOWN_CHARACTERS])}"
    elif "control character" in why:
        why += r" in a string: a line end is written \n"
    return BadRequestError(f"invalid JSON at byte {byte}: {why[:1].lower()}{why[1:]}")


def _begun(text: str) -> str:
    """Returns words for the beginning of `text`. They end before the first string, which may be long and incomplete."""
    before = text.partition('"')[0]
    return f"`{before}`" if before else "a string" if text else "the end of the body"


def decoded(decoder: "msgspec.json.Decoder[Value]", data: bytes, name: str = "") -> Value:
    """Returns the value of a body, or of its member `name`. Raises BadRequestError for an invalid value."""
    try:
        return decoder.decode(data)
    except RecursionError:
        reason = f"{name or 'the body'} is nested too deep"
    except ValueError as error:
        reason = _explained(str(error), data, name)
    raise BadRequestError(reason)  # not in a handler: there the error's context would keep the whole text in memory


def _explained(text: str, data: bytes, name: str) -> str:
    """Returns msgspec's message `text` in our words, with the name of the field."""
    if not data:
        return "the body is empty"
    what, _, place = text.partition(" - at `$")
    place = place.rstrip("`")
    where = place[1:] if not name and place.startswith(".") else f"{name or 'the body'}{place}"
    what = re.sub(r"`(\w+)(?: \| null)?`", lambda kind: _WORDS.get(kind[1], kind[1]), what)
    if (expected := _EXPECTED.fullmatch(what)) is not None:
        wanted, found = expected.groups()
        return f"{where} must be {wanted}" + (f", found {found}" if found else "")
    if (malformed := _MALFORMED.fullmatch(what)) is not None:
        why, byte = malformed.groups()
        return f"invalid JSON at byte {byte}: {why}"
    if "truncated" in what:
        return f"invalid JSON at byte {len(data)}: the body ends too early"
    if "base64" in what:
        return f'{where} is not base64, or begins as a data URL does: send only what follows "base64,"'
    return f"{where}: {what}"
