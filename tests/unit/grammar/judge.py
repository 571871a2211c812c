"""Checks answers with another library: that they are JSON and match the schema.

Numbers are exact. Where llguidance knowingly deviates from JSON Schema, the judge deviates too; each deviation is a
function here.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import TypeGuard

from jsonschema import Draft202012Validator, FormatChecker, ValidationError, validators

_EXPONENT = re.compile(r"(?<=[eE])([+-]?)[0-9]{5,}")
_NAME = re.compile(r'"(?:[^"\\]|\\.)*"(?=\s*:)')
_MARK = "\ue000"
"""Precedes a name that was written with an escape such as `\\u0078`."""
Keyword = Callable[[object, object, object, object], Iterator[ValidationError]]
"""Of a validator, a keyword's value, a value and its schema."""


class Escaped(str):
    """A name that was written with an escape."""


class Repeated(dict[str, object]):
    """Decodes an object with repeated names; the last one counts."""


def fault(schema: object, answer: str | bytes) -> str:
    """Returns the reason why this is not a JSON text that matches the schema; empty if it is."""
    try:
        text = answer if isinstance(answer, str) else answer.decode()
        value = json.loads(
            _NAME.sub(_marked, text), parse_float=_exact, parse_constant=_refuse, object_pairs_hook=_object
        )
    except ValueError as error:
        return f"no JSON: {error}"
    exact_schema = json.loads(json.dumps(schema), parse_float=Decimal)
    errors = sorted(_Validator(exact_schema, format_checker=_formats).iter_errors(value), key=str)
    return "; ".join(f"{error.json_path}: {error.message}" for error in errors)


def _marked(name: re.Match[str]) -> str:
    return name[0].replace('"', f'"{_MARK}', 1) if "\\u" in name[0] else name[0]


def _exact(number: str) -> Decimal:
    """Replaces exponents of five or more digits by 9999."""
    return Decimal(_EXPONENT.sub(r"\g<1>9999", number))


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _object(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = {Escaped(name[1:]) if name.startswith(_MARK) else name: value for name, value in pairs}
    return found if len(found) == len(pairs) else Repeated(found)


def _is_exact(value: object) -> TypeGuard[int | Decimal]:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_number(_: object, value: object) -> bool:
    return _is_exact(value)


def _is_integer(_: object, value: object) -> bool:
    return _is_exact(value) and Fraction(value).denominator == 1


def _multiple_of(validator: object, of: int | Decimal, value: object, schema: object) -> Iterator[ValidationError]:
    if _is_exact(value) and Fraction(value) % Fraction(of):
        yield ValidationError(f"{value} is no multiple of {of}")


def _min_properties(validator: object, least: int, value: object, schema: object) -> Iterator[ValidationError]:
    """Allows repeated names from `additionalProperties` or `patternProperties`, and counts each occurrence."""
    if isinstance(value, dict) and not isinstance(value, Repeated) and len(value) < least:
        yield ValidationError(f"{value} has fewer than {least} properties")


def _unescaped(keyword: str) -> Keyword:
    """Takes names that are written with `\\u` for additional properties, whatever they spell."""
    strict: Keyword = Draft202012Validator.VALIDATORS[keyword]

    def check(validator: object, of: object, value: object, schema: object) -> Iterator[ValidationError]:
        if isinstance(value, dict):
            value = {name: each for name, each in value.items() if not isinstance(name, Escaped)}
        yield from strict(validator, of, value, schema)

    return check


_types = Draft202012Validator.TYPE_CHECKER.redefine("number", _is_number).redefine("integer", _is_integer)
_Validator = validators.extend(  # type: ignore[no-untyped-call]  # it has no annotations
    Draft202012Validator,
    {
        "multipleOf": _multiple_of,
        "minProperties": _min_properties,
        **{keyword: _unescaped(keyword) for keyword in ("properties", "patternProperties")},
    },
    type_checker=_types,
)
_formats = FormatChecker()
_strict = Draft202012Validator.FORMAT_CHECKER


def _forgiving(form: str) -> Callable[[object], bool]:
    """Allows 29 February in any year, a year 0, and a leap second in any minute."""

    def conforms(value: object) -> bool:
        if not isinstance(value, str):
            return True
        return _strict.conforms(re.sub(r"^\d{4}(?=-)", "2000", value).replace(":60", ":59"), form)

    return conforms


for _form in ("date", "date-time", "time"):
    _formats.checks(_form)(_forgiving(_form))
