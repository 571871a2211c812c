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
ENFORCED = ""
PYDANTIC: dict[str, tuple[Schema, str]] = {
    "BaseModel": (MODEL, ENFORCED),
    "Optional[A]": ({"$defs": {"A": MODEL}, "anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}, ENFORCED),
    "Literal['a', 1]": ({"enum": ["a", 1]}, ENFORCED),
    "list[int], 1 to 3": ({"items": INTEGER, "maxItems": 3, "minItems": 1, "type": "array"}, ENFORCED),
    "tuple[int, str]": (
        {"maxItems": 2, "minItems": 2, "prefixItems": [INTEGER, STRING], "type": "array"},
        ENFORCED,
    ),
    "set[Color]": ({**COLOR, "items": {"$ref": "#/$defs/Color"}, "type": "array", "uniqueItems": True}, ENFORCED),
    "set[bool]": ({"items": {"type": "boolean"}, "type": "array", "uniqueItems": True}, ENFORCED),
    "set[int]": ({"items": INTEGER, "type": "array", "uniqueItems": True}, "uniqueItems"),
    "dict[str, int]": ({"additionalProperties": INTEGER, "type": "object"}, ENFORCED),
    "dict, 1 to 3": (
        {"additionalProperties": INTEGER, "maxProperties": 3, "minProperties": 1, "type": "object"},
        ENFORCED,
    ),
    "dict[Color, int]": (
        {**COLOR, "additionalProperties": INTEGER, "propertyNames": {"$ref": "#/$defs/Color"}, "type": "object"},
        ENFORCED,
    ),
    "dict[Literal['a'], int]": (
        {"additionalProperties": INTEGER, "propertyNames": {"const": "a"}, "type": "object"},
        ENFORCED,
    ),
    "dict[constr(pattern), int]": ({"patternProperties": {"^a": INTEGER}, "type": "object"}, ENFORCED),
    "dict[constr(min_length), int]": (
        {"additionalProperties": INTEGER, "propertyNames": {"minLength": 2}, "type": "object"},
        ENFORCED,
    ),
    "dict[UUID, int]": (
        {"additionalProperties": INTEGER, "propertyNames": {"format": "uuid"}, "type": "object"},
        "propertyNames",
    ),
    "Decimal": ({"anyOf": [{"type": "number"}, STRING]}, ENFORCED),
    "ByteSize": (
        {"anyOf": [{"pattern": r"^\s*(\d*\.?\d+)\s*(\w+)?", **STRING}, {"minimum": 0, **INTEGER}]},
        ENFORCED,
    ),
    "Json[int]": ({"contentMediaType": "application/json", "contentSchema": INTEGER, **STRING}, ENFORCED),
    "HttpUrl": ({"format": "uri", "maxLength": 2083, "minLength": 1, **STRING}, ENFORCED),
    **{
        name: ({"format": form, **STRING}, ENFORCED)
        for name, form in {
            "datetime": "date-time",
            "date": "date",
            "time": "time",
            "timedelta": "duration",
            "EmailStr": "email",
            "IPv4Address": "ipv4",
            "IPv6Address": "ipv6",
            "UUID": "uuid",
        }.items()
    },
    **{
        name: ({"format": form, **STRING}, f"Unknown format: {form}")
        for name, form in {
            "Path": "path",
            "FilePath": "file-path",
            "bytes": "binary",
            "SecretStr": "password",
            "Base64Bytes": "base64",
            "IPv4Network": "ipv4network",
            "UUID4": "uuid4",
            "Pattern": "regex",
            "PostgresDsn": "multi-host-uri",
        }.items()
    },
}
ZOD: dict[str, tuple[Schema, str]] = {
    "int": ({**INTEGER, "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, ENFORCED),
    "float32": ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, ENFORCED),
    "float64": ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, ENFORCED),
    "uuidv4": ({**STRING, "format": "uuid", "pattern": UUID4}, ENFORCED),
    "startsWith": ({**STRING, "format": "starts_with", "pattern": "^a.*"}, "Unknown format: starts_with"),
    "regex with look-ahead": ({**STRING, "pattern": r"^(?=.*\d)[a-z\d]+$"}, ENFORCED),
    "record": ({"type": "object", "propertyNames": STRING, "additionalProperties": INTEGER}, ENFORCED),
    "record of an enum": (
        {
            "type": "object",
            "propertyNames": {**STRING, "enum": ["a", "b"]},
            "additionalProperties": INTEGER,
            "required": ["a", "b"],
        },
        ENFORCED,
    ),
    "tuple with a rest": ({"type": "array", "prefixItems": [STRING], "items": INTEGER, "minItems": 1}, ENFORCED),
    "nullable": ({"type": ["string", "null"]}, ENFORCED),
    "lazy": ({"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}, ENFORCED),
    "looseObject": ({**MODEL, "additionalProperties": {}}, ENFORCED),
    "catchall": ({**MODEL, "additionalProperties": STRING}, ENFORCED),
    "looseRecord": ({"type": "object", "patternProperties": {"^a": INTEGER}}, ENFORCED),
    "literal": ({"enum": ["a", 1, None]}, ENFORCED),
    "templateLiteral": ({**STRING, "pattern": r"^a-?\d+(?:\.\d+)?$"}, ENFORCED),
    "discriminatedUnion": ({"oneOf": [CAT, DOG]}, ENFORCED),
    "json": (
        {
            "anyOf": [
                *({"type": each} for each in ("string", "number", "boolean", "null")),
                {"type": "array", "items": {"$ref": "#"}},
                {"type": "object", "propertyNames": STRING, "additionalProperties": {"$ref": "#"}},
            ]
        },
        ENFORCED,
    ),
    "email": ({**STRING, "format": "email", "pattern": EMAIL}, ENFORCED),
    "url": ({**STRING, "format": "uri"}, ENFORCED),
    "iso.datetime": ({**STRING, "format": "date-time", "pattern": DATE_TIME}, ENFORCED),
    "iso.time": ({**STRING, "pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$"}, ENFORCED),
    "hostname": (
        {**STRING, "format": "hostname", "pattern": r"^(?=.{1,253}\.?$)[a-z0-9]+(?:\.[a-z]+)*$"},
        ENFORCED,
    ),
    "iso.duration": ({**STRING, "format": "duration", "pattern": r"^P(?:(\d+W)|(?!.*W)(\d+Y)?)$"}, ENFORCED),
    **{
        name: ({**STRING, "format": form, "pattern": pattern}, f"Unknown format: {form}")
        for name, form, pattern in (
            ("cuid2", "cuid2", "^[0-9a-z]+$"),
            ("nanoid", "nanoid", "^[a-zA-Z0-9_-]{21}$"),
            ("e164", "e164", r"^\+[1-9]\d{6,14}$"),
            ("hash", "sha256_hex", "^[0-9a-fA-F]{64}$"),
            ("lowercase", "lowercase", "^[^A-Z]*$"),
            ("includes", "includes", "a"),
        )
    },
    "jwt": ({**STRING, "format": "jwt"}, "Unknown format: jwt"),
    "file": ({**STRING, "format": "binary", "contentEncoding": "binary"}, "Unknown format: binary"),
    "record of emails": (
        {"type": "object", "propertyNames": {"format": "email", "pattern": EMAIL}, "additionalProperties": INTEGER},
        "propertyNames",
    ),
    "never": ({"not": {}}, "not"),
}
ZOD_3: dict[str, tuple[Schema, str]] = {
    "set": ({"type": "array", "uniqueItems": True, "items": STRING}, "uniqueItems"),
    "set of an enum": ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}}, ENFORCED),
    "map": (
        {
            "type": "array",
            "maxItems": 125,
            "items": {"type": "array", "items": [STRING, INTEGER], "minItems": 2, "maxItems": 2},
        },
        ENFORCED,
    ),
    "record of an enum": (
        {"type": "object", "additionalProperties": INTEGER, "propertyNames": {"enum": ["a", "b"]}},
        ENFORCED,
    ),
    "bigint": ({**INTEGER, "format": "int64"}, ENFORCED),
    "optional": ({"anyOf": [{"not": {}}, STRING]}, ENFORCED),
    "two patterns": ({**STRING, "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ENFORCED),
    "ip": ({**STRING, "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}, ENFORCED),
    "base64": ({**STRING, "contentEncoding": "base64"}, ENFORCED),
    "the same object twice": (
        {"type": "object", "properties": {"a": MODEL, "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]},
        ENFORCED,
    ),
    "intersection": (
        {"allOf": [MODEL, {"type": "object", "properties": {"b": INTEGER}}], "unevaluatedProperties": False},
        "unevaluatedProperties",
    ),
}
"""What zod-to-json-schema writes for the types of zod 3, where it differs."""
OPENAPI: dict[str, tuple[Schema, str]] = {
    **{each: ({**INTEGER, "format": each}, ENFORCED) for each in ("int32", "int64")},
    **{each: ({"type": "number", "format": each}, ENFORCED) for each in ("float", "double")},
    **{each: ({**STRING, "format": each}, f"Unknown format: {each}") for each in ("byte", "binary", "password")},
    "nullable": ({**STRING, "nullable": True}, ENFORCED),
    "readOnly": ({"type": "object", "properties": {"id": {**INTEGER, "readOnly": True, "example": 1}}}, ENFORCED),
    "discriminator": ({"oneOf": [CAT, DOG], "discriminator": {"propertyName": "is"}}, ENFORCED),
}
TYPES = {
    f"{name} of {library}": row
    for library, rows in (("pydantic", PYDANTIC), ("zod", ZOD), ("zod 3", ZOD_3), ("OpenAPI", OPENAPI))
    for name, row in rows.items()
}


@pytest.mark.parametrize("name", TYPES)
def test_each_type_is_enforced_or_the_log_says_what_is_not(name: str) -> None:
    (schema, left_out), tokenizer, random = TYPES[name], words_tokenizer(), Random(name)
    grammar = LocalGrammar(compiler_of(tokenizer), format_of(schema))
    assert left_out in grammar.left_out
    assert bool(left_out) == bool(grammar.left_out)
    found = walk(grammar.own_guide(), tokenizer, random, Impatient(tokenizer, random))
    if not left_out and name != "map of zod 3":  # its list of items is of a draft that the judge does not know
        answers = [spelled(found.tokens[:count], tokenizer) for count in found.complete]
        assert [fault(schema, answer) for answer in answers] == [""] * len(answers)


def test_what_zod_writes_and_contradicts_itself_is_refused() -> None:
    contradictions: list[Schema] = [
        {"type": "string", "nullable": True, "enum": [None]},  # null in OpenAPI
        {"type": "string", "allOf": [{"pattern": r"^\d\.\d/\d$"}, {"pattern": r"^[a-f]*:/\d$"}]},  # cidr of zod 3
    ]
    for schema in contradictions:
        with pytest.raises(RequestError, match=r"incompatible types|Regex is empty"):
            compiler_of(words_tokenizer()).compile(format_of(schema))
