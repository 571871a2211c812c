"""Schemas of pydantic's, zod's and OpenAPI's types: enforced, in part, or refused (docs/structured-output.md)."""

from random import Random

import pytest

from runner.errors import RequestError
from tests.lib.local_grammar import LocalGrammar
from tests.unit.grammar.judge import fault
from tests.unit.grammar.walks import Impatient, compiler_of, format_of, spelled, walk, words_tokenizer

Schema = dict[str, object]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
COLOR: Schema = {"$defs": {"Color": {"enum": ["red", "blue"], "title": "Color", "type": "string"}}}
MODEL: Schema = {"properties": {"x": {"title": "X", **INTEGER}}, "required": ["x"], "title": "A", "type": "object"}
UUID4 = "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$"
EMAIL = r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
CAT, DOG = ({"type": "object", "properties": {"is": {"const": each}}, "required": ["is"]} for each in ("cat", "dog"))
DATE_TIME = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:("
    r"?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1"
    r"\d|2[0-8])))T(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z))$"
)
PYDANTIC: dict[str, Schema] = {
    "BaseModel": MODEL,
    "Optional[A]": {"$defs": {"A": MODEL}, "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
    "Literal['a', 1]": {"enum": ["a", 1]},
    "list[int], 1 to 3": {"items": INTEGER, "maxItems": 3, "minItems": 1, "type": "array"},
    "tuple[int, str]": {"maxItems": 2, "minItems": 2, "prefixItems": [INTEGER, STRING], "type": "array"},
    "set[Color]": {**COLOR, "items": {"$ref": "#/$defs/Color"}, "type": "array", "uniqueItems": True},
    "set[bool]": {"items": {"type": "boolean"}, "type": "array", "uniqueItems": True},
    "dict[str, int]": {"additionalProperties": INTEGER, "type": "object"},
    "dict, 1 to 3": {"additionalProperties": INTEGER, "maxProperties": 3, "minProperties": 1, "type": "object"},
    "dict[Color, int]": {
        **COLOR,
        "additionalProperties": INTEGER,
        "propertyNames": {"$ref": "#/$defs/Color"},
        "type": "object",
    },
    "dict[Literal['a'], int]": {"additionalProperties": INTEGER, "propertyNames": {"const": "a"}, "type": "object"},
    "dict[constr(pattern), int]": {"patternProperties": {"^a": INTEGER}, "type": "object"},
    "dict[constr(min_length), int]": {
        "additionalProperties": INTEGER,
        "propertyNames": {"minLength": 2},
        "type": "object",
    },
    "Decimal": {"anyOf": [{"type": "number"}, STRING]},
    "ByteSize": {"anyOf": [{"pattern": r"^\s*(\d*\.?\d+)\s*(\w+)?", **STRING}, {"minimum": 0, **INTEGER}]},
    "Json[int]": {"contentMediaType": "application/json", "contentSchema": INTEGER, **STRING},
    "HttpUrl": {"format": "uri", "maxLength": 2083, "minLength": 1, **STRING},
    **{
        form: {"format": form, **STRING}
        for form in ("date-time", "date", "time", "duration", "email", "ipv4", "ipv6", "uuid")
    },
}
ZOD: dict[str, Schema] = {
    "int": {**INTEGER, "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
    "float32": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    "float64": {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    "uuidv4": {**STRING, "format": "uuid", "pattern": UUID4},
    "regex with look-ahead": {**STRING, "pattern": r"^(?=.*\d)[a-z\d]+$"},
    "record": {"type": "object", "propertyNames": STRING, "additionalProperties": INTEGER},
    "record of an enum": {
        "type": "object",
        "propertyNames": {**STRING, "enum": ["a", "b"]},
        "additionalProperties": INTEGER,
        "required": ["a", "b"],
    },
    "tuple with a rest": {"type": "array", "prefixItems": [STRING], "items": INTEGER, "minItems": 1},
    "nullable": {"type": ["string", "null"]},
    "lazy": {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    "looseObject": {**MODEL, "additionalProperties": {}},
    "catchall": {**MODEL, "additionalProperties": STRING},
    "looseRecord": {"type": "object", "patternProperties": {"^a": INTEGER}},
    "literal": {"enum": ["a", 1, None]},
    "templateLiteral": {**STRING, "pattern": r"^a-?\d+(?:\.\d+)?$"},
    "discriminatedUnion": {"oneOf": [CAT, DOG]},
    "json": {
        "anyOf": [
            *({"type": each} for each in ("string", "number", "boolean", "null")),
            {"type": "array", "items": {"$ref": "#"}},
            {"type": "object", "propertyNames": STRING, "additionalProperties": {"$ref": "#"}},
        ]
    },
    "email": {**STRING, "format": "email", "pattern": EMAIL},
    "url": {**STRING, "format": "uri"},
    "iso.datetime": {**STRING, "format": "date-time", "pattern": DATE_TIME},
    "iso.time": {**STRING, "pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$"},
    "hostname": {**STRING, "format": "hostname", "pattern": r"^(?=.{1,253}\.?$)[a-z0-9]+(?:\.[a-z]+)*$"},
    "iso.duration": {**STRING, "format": "duration", "pattern": r"^P(?:(\d+W)|(?!.*W)(\d+Y)?)$"},
}
ZOD_3: dict[str, Schema] = {
    "set of an enum": {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}},
    "map": {
        "type": "array",
        "maxItems": 125,
        "items": {"type": "array", "items": [STRING, INTEGER], "minItems": 2, "maxItems": 2},
    },
    "record of an enum": {"type": "object", "additionalProperties": INTEGER, "propertyNames": {"enum": ["a", "b"]}},
    "bigint": {**INTEGER, "format": "int64"},
    "optional": {"anyOf": [{"not": {}}, STRING]},
    "two patterns": {**STRING, "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
    "ip": {**STRING, "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]},
    "base64": {**STRING, "contentEncoding": "base64"},
    "the same object twice": {
        "type": "object",
        "properties": {"a": MODEL, "b": {"$ref": "#/properties/a"}},
        "required": ["a", "b"],
    },
}
"""What zod-to-json-schema writes for the types of zod 3, where it differs."""
OPENAPI: dict[str, Schema] = {
    **{each: {**INTEGER, "format": each} for each in ("int32", "int64")},
    **{each: {"type": "number", "format": each} for each in ("float", "double")},
    "nullable": {**STRING, "nullable": True},
    "readOnly": {"type": "object", "properties": {"id": {**INTEGER, "readOnly": True, "example": 1}}},
    "discriminator": {"oneOf": [CAT, DOG], "discriminator": {"propertyName": "is"}},
}
ENFORCED = {
    f"{name} of {library}": row
    for library, rows in (("pydantic", PYDANTIC), ("zod", ZOD), ("zod 3", ZOD_3), ("OpenAPI", OPENAPI))
    for name, row in rows.items()
}
UNKNOWN_FORMATS = {
    "pydantic": ["path", "file-path", "binary", "password", "base64", "ipv4network", "uuid4", "regex"],
    "pydantic's databases": ["multi-host-uri"],
    "zod": ["jwt", "binary"],
    "OpenAPI": ["byte", "binary", "password"],
}
PATTERNS_OF_ZOD = {
    "starts_with": "^a.*",
    "cuid2": "^[0-9a-z]+$",
    "nanoid": "^[a-zA-Z0-9_-]{21}$",
    "e164": r"^\+[1-9]\d{6,14}$",
    "sha256_hex": "^[0-9a-fA-F]{64}$",
    "lowercase": "^[^A-Z]*$",
    "includes": "a",
}
"""The unknown formats beside which zod writes a pattern."""
NAMED: Schema = {"type": "object", "additionalProperties": INTEGER}
LEFT_OUT: dict[str, tuple[Schema, str]] = {
    "set[int] of pydantic": ({"items": INTEGER, "type": "array", "uniqueItems": True}, "uniqueItems"),
    "dict[UUID, int] of pydantic": ({**NAMED, "propertyNames": {"format": "uuid"}}, "propertyNames"),
    "record of zod": ({**NAMED, "propertyNames": {"format": "email", "pattern": EMAIL}}, "propertyNames"),
    "never of zod": ({"not": {}}, "not"),
    "intersection of zod 3": ({"allOf": [MODEL, NAMED], "unevaluatedProperties": False}, "unevaluatedProperties"),
    **{
        f"{form} of {library}": ({**STRING, "format": form}, f"Unknown format: {form}")
        for library, forms in UNKNOWN_FORMATS.items()
        for form in forms
    },
    **{
        f"{form} of zod": ({**STRING, "format": form, "pattern": pattern}, f"Unknown format: {form}")
        for form, pattern in PATTERNS_OF_ZOD.items()
    },
}


@pytest.mark.parametrize("name", ENFORCED)
def test_each_type_is_enforced(name: str) -> None:
    schema, tokenizer, random = ENFORCED[name], words_tokenizer(), Random(name)
    grammar = LocalGrammar(compiler_of(tokenizer), format_of(schema))
    assert not grammar.left_out
    found = walk(grammar.own_guide(), tokenizer, random, Impatient(tokenizer, random))
    if name != "map of zod 3":  # its list of items is of a draft that the judge does not know
        answers = [spelled(found.tokens[:count], tokenizer) for count in found.complete]
        assert [fault(schema, answer) for answer in answers] == [""] * len(answers)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_log_says_which_part_of_a_type_is_not_enforced(name: str) -> None:
    (schema, left_out), tokenizer, random = LEFT_OUT[name], words_tokenizer(), Random(name)
    grammar = LocalGrammar(compiler_of(tokenizer), format_of(schema))
    assert left_out in grammar.left_out
    assert walk(grammar.own_guide(), tokenizer, random, Impatient(tokenizer, random)).complete


def test_what_zod_writes_and_contradicts_itself_is_refused() -> None:
    contradictions: list[Schema] = [
        {"type": "string", "nullable": True, "enum": [None]},  # null in OpenAPI
        {"type": "string", "allOf": [{"pattern": r"^\d\.\d/\d$"}, {"pattern": r"^[a-f]*:/\d$"}]},  # cidr of zod 3
    ]
    for schema in contradictions:
        with pytest.raises(RequestError, match=r"incompatible types|Regex is empty"):
            compiler_of(words_tokenizer()).compile(format_of(schema))
