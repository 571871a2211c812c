"""JSON decoded with the tolerance of Go's encoding/json, which every host relies on.

Keys match whatever their case, unknown keys are ignored, null leaves the zero value, only the first JSON value of a
body is read, and a value of the wrong type refuses the whole body.
"""

import json
import re
from functools import cache
from typing import TypeVar, get_args, get_origin

import msgspec

StructT = TypeVar("StructT", bound=msgspec.Struct)
_NULL = b"null"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class BadRequestError(ValueError):
    """The body is not what the endpoint takes; hosts know the text `Bad Request`."""


def decode(body: bytes, wanted: type[StructT]) -> StructT:
    """The first JSON value of `body` as a `wanted`; BadRequestError when it is not one."""
    try:
        try:
            return _struct(body, wanted)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            return _struct(_first_value(body), wanted)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequestError(str(error)) from error


def _struct(data: bytes | msgspec.Raw, wanted: type[StructT]) -> StructT:
    members = msgspec.json.decode(data, type=dict[str, msgspec.Raw] | None) or {}
    fields = _fields(wanted)
    values: dict[str, object] = {}
    for key, raw in members.items():
        field = fields.get(key.lower())
        if field is not None and not _is_null(raw):
            values[field.name] = _value(raw, field.type)
    return wanted(**values)


def _is_null(raw: msgspec.Raw) -> bool:
    return memoryview(raw).nbytes == len(_NULL) and bytes(raw) == _NULL


def _value(raw: msgspec.Raw, wanted: type) -> object:
    if wanted is msgspec.Raw:
        return raw.copy()
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        return _struct(raw, wanted)
    if get_origin(wanted) is list and issubclass(item := get_args(wanted)[0], msgspec.Struct):
        return [_struct(element, item) for element in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    return msgspec.json.decode(raw, type=wanted)


@cache
def _fields(wanted: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.encode_name.lower(): field for field in msgspec.structs.fields(wanted)}


def _first_value(body: bytes) -> bytes:
    """What strict JSON refuses and Go takes: text after the first value, invalid UTF-8, halves of surrogate pairs."""
    text = body.decode(errors="replace").lstrip(" \t\r\n")
    value, _ = json.JSONDecoder(parse_constant=_refuse).raw_decode(text)
    return _LONE_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)).encode()


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
