"""A model of Go's encoding/json: it decodes a request body character by character, without a JSON library.

It covers only completion requests: the first value of a body is read as a struct with the fields of `FIELDS`.
"""

import re
from collections.abc import Mapping
from ctypes import c_float
from math import isinf
from typing import NoReturn

Kind = str | list[str] | Mapping[str, "Kind"]

MEDIUM: Mapping[str, Kind] = {"Kind": "string"}
OPTIONS: Mapping[str, Kind] = {
    **dict.fromkeys(("seed", "num_predict", "top_k", "repeat_last_n"), "int"),
    **dict.fromkeys(
        ("top_p", "min_p", "temperature", "repeat_penalty", "presence_penalty", "frequency_penalty"), "float32"
    ),
    "stop": ["string"],
}
FIELDS: Mapping[str, Kind] = {
    "Prompt": "string",
    "Media": [MEDIUM],  # type: ignore[list-item]  # a list of structs
    "Format": "raw",
    "Options": OPTIONS,
    "Logprobs": "bool",
    "TopLogprobs": "int",
    "IncludeIntermediateMetrics": "bool",
}
"""The fields that the runner looks at, and Go's type of each."""

DEEPEST = 10000
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)([.][0-9]+)?([eE][-+]?[0-9]+)?")
_INTEGER = re.compile("-?[0-9]{1,19}")
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "/": "/", "\\": "\\", '"': '"'}


class RefusedError(Exception):
    """Go's decoder returns an error."""


class Number(str):
    """A number as it is written."""

    __slots__ = ()


class Members(list[tuple[str, object, str]]):
    """An object: key, value and the value's text, in order."""


def decode(body: bytes) -> dict[str, object]:
    """The fields of the request that are not zero, those of Options among them under their own names."""
    text = _per_byte(body)
    value, _ = _Scanner(text).value(_Scanner(text).space(0), 0)
    request: dict[str, object] = {}
    if value is not None:
        _store(request, value, FIELDS)
    options = request.pop("Options", {})
    assert isinstance(options, dict)
    return {name: value for name, value in {**request, **options}.items() if value}


def _per_byte(body: bytes) -> str:
    """Go reads one U+FFFD for each byte that is no part of a character."""
    return "".join(
        "\ufffd" if 0xDC80 <= ord(character) <= 0xDCFF else character
        for character in body.decode(errors="surrogateescape")
    )


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text

    def space(self, at: int) -> int:
        while self.text[at : at + 1] in {" ", "\t", "\r", "\n"}:
            at += 1
        return at

    def value(self, at: int, depth: int) -> tuple[object, int]:
        """The value that begins at `at`, and where it ends."""
        character = self.text[at : at + 1]
        if character in {"{", "["} and depth == DEEPEST:
            self.fail(at)
        if character == "{":
            return self.members(at, depth)
        if character == "[":
            return self.array(at, depth)
        if character == '"':
            return self.string(at)
        for word, meaning in (("null", None), ("true", True), ("false", False)):
            if self.text.startswith(word, at):
                return meaning, at + len(word)
        number = _NUMBER.match(self.text, at)
        if number is None:
            self.fail(at)
        return Number(number[0]), number.end()

    def members(self, at: int, depth: int) -> tuple[Members, int]:
        members = Members()
        at = self.space(at + 1)
        while self.text[at : at + 1] != "}" or members:
            key, at = self.string(at)
            at = self.space(self.take(":", self.space(at)))
            value, end = self.value(at, depth + 1)
            members.append((key, value, self.text[at:end]))
            at = self.space(end)
            if self.text[at : at + 1] == "}":
                break
            at = self.space(self.take(",", at))
        return members, at + 1

    def array(self, at: int, depth: int) -> tuple[list[object], int]:
        items: list[object] = []
        at = self.space(at + 1)
        while self.text[at : at + 1] != "]" or items:
            item, end = self.value(at, depth + 1)
            items.append(item)
            at = self.space(end)
            if self.text[at : at + 1] == "]":
                break
            at = self.space(self.take(",", at))
        return items, at + 1

    def string(self, at: int) -> tuple[str, int]:
        units: list[str] = []  # halves of pairs stand alone at first
        at = self.take('"', at)
        while (character := self.text[at : at + 1]) != '"':
            if character < " ":
                self.fail(at)
            at += 1
            if character == "\\":
                character, at = self.escape(at)
            units.append(character)
        return "".join(units).encode("utf-16", "surrogatepass").decode("utf-16", "replace"), at + 1

    def escape(self, at: int) -> tuple[str, int]:
        character = self.text[at : at + 1]
        if character in _ESCAPES:
            return _ESCAPES[character], at + 1
        digits = re.compile("u([0-9a-fA-F]{4})").match(self.text, at)
        if digits is None:
            self.fail(at)
        return chr(int(digits[1], 16)), digits.end()

    def take(self, wanted: str, at: int) -> int:
        if self.text[at : at + 1] != wanted:
            self.fail(at)
        return at + 1

    def fail(self, at: int) -> NoReturn:
        raise RefusedError(f"not JSON at {at}")


def _store(into: dict[str, object], value: object, fields: Mapping[str, Kind]) -> None:
    """Set each member's field of `into` in turn."""
    if not isinstance(value, Members):
        raise RefusedError("not an object")
    for key, item, text in value:
        name = next((name for name in fields if _fold(name) == _fold(key)), None)
        if name is None:
            continue
        kind = fields[name]
        if item is None and not isinstance(kind, list):
            if kind == "raw":
                into.pop(name, None)
        elif kind == "raw":
            into[name] = text
        elif isinstance(kind, Mapping):
            _store(into.setdefault(name, {}), item, kind)  # type: ignore[arg-type]  # made here as a dict
        else:
            into[name] = _read(item, kind)


def _read(item: object, kind: Kind) -> object:
    """One value as the Go type. An array that is there already is not written over, unlike in Go."""
    if isinstance(kind, list):
        if item is None:
            return []
        if type(item) is not list:
            raise RefusedError("not an array")
        return [_read(element, kind[0]) for element in item]
    if isinstance(kind, Mapping):
        struct: dict[str, object] = {}
        if item is not None:
            _store(struct, item, kind)
        return struct.get("Kind", "")
    if item is None:
        return ""
    if (kind == "string" and type(item) is str) or (kind == "bool" and type(item) is bool):
        return item
    if kind == "int" and isinstance(item, Number) and _INTEGER.fullmatch(item) and -(2**63) <= int(item) < 2**63:
        return int(item)
    if kind == "float32" and isinstance(item, Number):
        single = c_float(float(item)).value
        if not isinf(single):
            return single
    raise RefusedError(f"{item!r} is no {kind}")


def _fold(key: str) -> str:
    """Equal for keys that Go takes for the same: letters of ASCII in any case, and two signs that look like them."""
    return "".join({"\u017f": "s", "\u212a": "k"}.get(c, c.lower() if c.isascii() else c) for c in key)
