"""Every feature of JSON Schema that llguidance supports, by name: accepted and refused texts."""

import sys
from typing import NamedTuple

import pytest

from runner.errors import RequestError
from tests.unit.grammar.judge import fault
from tests.unit.grammar.walks import accepts, bytes_tokenizer, compiler_of, format_of, guide_of, words_tokenizer

Schema = dict[str, object]


class Feature(NamedTuple):
    """A schema, texts that match it, and JSON texts that do not."""

    schema: Schema
    good: tuple[str, ...]
    bad: tuple[str, ...]


LIST: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {"type": "array", "prefixItems": [{"type": "integer"}, {"$ref": "#/$defs/node"}], "items": False}
    },
}
BY_KIND: Schema = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "value": {"type": type_}},
            "required": ["kind", "value"],
        }
        for kind, type_ in (("n", "integer"), ("s", "string"))
    ]
}
OBJECT: Schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}
SET: Schema = {"type": "array", "items": {"type": "string", "enum": ["a", "b", "c"]}, "uniqueItems": True}
NAMED: Schema = {"type": "object", "additionalProperties": {"type": "integer"}}
ENUM: Schema = {"$defs": {"x": {"title": "X", "enum": ["a", "b"]}}}
FEATURES = {
    "anything": Feature({}, ("null", "[1, {}]", '"x"', "-1.5e3"), ()),
    "oneOf by a property": Feature(
        BY_KIND, ('{"kind": "n", "value": 1}', '{"kind": "s", "value": ""}'), ('{"kind": "n", "value": ""}',)
    ),
    "allOf of objects": Feature(
        {"allOf": [{**OBJECT, "required": ["a"]}, {"properties": {"c": {"type": "null"}}, "required": ["c"]}]},
        ('{"a": 1, "c": null}', '{"a": 1, "b": true, "c": null}'),
        ('{"a": 1}', '{"a": 1, "c": 1}'),
    ),
    "$ref to definitions": Feature({"$ref": "#/definitions/x", "definitions": {"x": {"const": 1}}}, ("1",), ("2",)),
    "$ref that recurs in definitions": Feature(LIST, ("[]", "[1]", "[1, [2, []]]"), ('["a"]', "[1, 2]", "[1, [], 1]")),
    "const": Feature({"const": {"a": [1, "ü"]}}, ('{"a": [1, "ü"]}',), ('{"a": [1, "u"]}', "{}")),
    "enum": Feature({"enum": ["a", "ab", 1, None, [True]]}, ('"a"', '"ab"', "1", "null", "[true]"), ('"b"', "2", "[]")),
    "type list": Feature({"type": ["integer", "null"]}, ("1", "null"), ("true", '"x"')),
    "sibling keys of $ref": Feature(
        {"$ref": "#/$defs/x", "maxLength": 3, "$defs": {"x": {"type": "string", "minLength": 2}}},
        ('"ab"', '"abc"'),
        ('"a"', '"abcd"'),
    ),
    "items": Feature({"type": "array", "items": {"type": "integer"}}, ("[]", "[1, 2]"), ('["a"]', "[1, null]")),
    "prefixItems": Feature(
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        ("[]", "[1]", '[1, "a"]', '[1, "a", null]'),
        ('["a"]', "[1, 1]"),
    ),
    "items: false": Feature(
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ("[]", "[1]"), ("[1, 1]",)
    ),
    "minItems": Feature({"type": "array", "minItems": 2}, ("[1, 2]", "[1, 2, 3]"), ("[]", "[1]")),
    "properties": Feature(OBJECT, ("{}", '{"a": 1, "b": true}', '{"b": false}'), ('{"a": "1"}', '{"b": 1}')),
    "additionalProperties: true": Feature(
        {**OBJECT, "additionalProperties": True}, ("{}", '{"b": false, "x": 1}'), ('{"b": 1, "x": 1}',)
    ),
    "required": Feature({**OBJECT, "required": ["b"]}, ('{"b": true}', '{"a": 1, "b": true}'), ("{}", '{"a": 1}')),
    "additionalProperties: false": Feature(
        {**OBJECT, "additionalProperties": False}, ("{}", '{"a": 1}'), ('{"x": 1}', '{"a": 1, "x": 1}')
    ),
    "additionalProperties": Feature(
        {**OBJECT, "additionalProperties": {"type": "null"}}, ('{"x": null}', '{"a": 1, "x": null}'), ('{"x": 1}',)
    ),
    "patternProperties": Feature(
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "integer"}, "^[0-9]+$": {"type": "null"}},
            "additionalProperties": False,
        },
        ('{"xa": 1}', '{"12": null, "x": 2}'),
        ('{"xa": null}', '{"12": 1}', '{"a": 1}'),
    ),
    "minProperties": Feature({"type": "object", "minProperties": 2}, ('{"a": 1, "b": 2}',), ("{}", '{"a": 1}')),
    "maxProperties": Feature({"type": "object", "maxProperties": 1}, ("{}", '{"a": 1}'), ('{"a": 1, "b": 2}',)),
    "counts as decimals": Feature(
        {"type": "array", "minItems": 1.0, "maxItems": 2.0, "items": {"type": "string", "maxLength": 1.0}},
        ('["a"]', '["a", ""]'),
        ("[]", '["ab"]', '["", "", ""]'),
    ),
    "minLength": Feature({"type": "string", "minLength": 2}, ('"ab"', '"日本"', '"\\n\\\\"'), ('"a"', '"é"', '"\\n"')),
    "maxLength": Feature({"type": "string", "maxLength": 2}, ('""', '"日本"', '"\\n\\""'), ('"abc"',)),
    "pattern": Feature({"type": "string", "pattern": "^a+$"}, ('"a"', '"aa"'), ('""', '"ab"', '"ba"')),
    "minimum": Feature({"type": "number", "minimum": 1.5}, ("1.5", "2", "100.25"), ("1.4", "1", "-2")),
    "maximum": Feature({"type": "number", "maximum": -1.5}, ("-1.5", "-20"), ("-1.4", "0")),
    "exclusiveMinimum": Feature({"type": "integer", "exclusiveMinimum": 7}, ("8", "70"), ("7", "6", "-8")),
    "multipleOf": Feature({"type": "integer", "multipleOf": 7}, ("0", "49", "-14"), ("1", "50")),
    "multipleOf of a fraction": Feature({"type": "number", "multipleOf": 0.25}, ("0.25", "3", "1.50"), ("0.3", "1.1")),
    "the bounds of a double": Feature(
        {"type": "number", "minimum": -sys.float_info.max, "exclusiveMaximum": sys.float_info.max},
        ("0", "-900000000000000000", "899999999999999999.5"),
        ('"0"',),
    ),
    "the bounds of 64 bits": Feature(
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ("0", "-9200000000000000000"), ("0.5",)
    ),
    "uniqueItems of an enumeration": Feature(
        {**SET, "minItems": 1, "maxItems": 2}, ('["a"]', '["c", "a"]'), ("[]", '["a", "a"]', '["a", "b", "c"]', '["d"]')
    ),
    "uniqueItems of a reference": Feature(
        {"type": "array", "items": {"$ref": "#/$defs/x"}, "uniqueItems": True, "$defs": {"x": {"type": "boolean"}}},
        ("[]", "[true, false]", "[false, true]"),
        ("[true, true]", "[1]"),
    ),
    "uniqueItems: false": Feature({**SET, "uniqueItems": False}, ('["a", "a"]',), ('["d"]',)),
    "contains": Feature(
        {"type": "array", "items": {"type": "integer"}, "contains": {"maximum": 0}},
        ("[0]", "[1, 0]", "[1, 2, 3, 4, 5, 6, 7, 0, 1]"),
        ("[]", "[1]", '["a", 0]'),
    ),
    "minContains": Feature(
        {"type": "array", "contains": {"const": 1}, "minContains": 2, "maxItems": 4},
        ("[1, 1]", "[2, 1, 2, 1]"),
        ("[1]", "[1, 2]", "[2, 2, 2, 1, 1]"),
    ),
    "minContains: 0": Feature({"type": "array", "contains": {"const": 1}, "minContains": 0}, ("[]", "[2]"), ("1",)),
    "propertyNames with enum": Feature(
        {**NAMED, "propertyNames": {"enum": ["a", "b"]}, "required": ["b"]},
        ('{"b": 1}', '{"a": 1, "b": 2}'),
        ("{}", '{"a": 1}', '{"b": 1, "c": 1}', '{"b": null}'),
    ),
    "propertyNames beside properties": Feature(
        {**NAMED, "properties": {"b": {"type": "null"}, "c": {}}, "propertyNames": {"$ref": "#/$defs/x"}, **ENUM},
        ("{}", '{"b": null}', '{"b": null, "a": 1}'),
        ('{"c": 1}', '{"b": 1}', '{"a": null}'),
    ),
    "propertyNames alone": Feature(
        {"type": "object", "propertyNames": {"enum": ["a"]}}, ("{}", '{"a": [1]}'), ('{"b": 1}',)
    ),
    "propertyNames with const": Feature({**NAMED, "propertyNames": {"const": "a"}}, ("{}", '{"a": 1}'), ('{"b": 1}',)),
    "propertyNames with pattern": Feature(
        {**NAMED, "propertyNames": {"type": "string", "pattern": "^x"}}, ("{}", '{"xa": 1}'), ('{"a": 1}', '{"x": ""}')
    ),
    "propertyNames with lengths": Feature(
        {**NAMED, "propertyNames": {"minLength": 1, "maxLength": 2}}, ("{}", '{"é日": 1}'), ('{"": 1}', '{"abc": 1}')
    ),
    "propertyNames with a largest length": Feature(
        {**NAMED, "propertyNames": {"maxLength": 1}}, ('{"": 1}',), ('{"ab": 1}',)
    ),
    "propertyNames of any text beside properties": Feature(
        {**NAMED, "properties": {"a": {"type": "null"}}, "propertyNames": {"type": "string"}},
        ('{"x": 1}', '{"a": null, "x": 1}'),
        ('{"a": 1}',),
    ),
    "propertyNames of any text": Feature({**NAMED, "propertyNames": {"type": "string"}}, ('{"x": 1}',), ('{"x": ""}',)),
}
OF_FORMATS = {
    "date-time": ('"2026-11-22T06:44:58Z"', '"2026-11-22 06:44"'),
    "time": ('"06:44:58+01:00"', '"25:00:00Z"'),
    "date": ('"2026-11-22"', '"2026-13-22"'),
    "duration": ('"P1DT2H"', '"1D"'),
    "email": ('"a.b@example.org"', '"a.b"'),
    "hostname": ('"example.org"', '"-a"'),
    "ipv4": ('"127.0.0.1"', '"256.0.0.1"'),
    "ipv6": ('"::1"', '"1::2::3"'),
    "uuid": ('"123e4567-e89b-12d3-a456-426614174000"', '"123e4567"'),
    "uri": ('"https://example.org/a?b#c"', '"example"'),
}
FEATURES |= {
    f"format {name}": Feature({"type": "string", "format": name}, (good,), (bad,))
    for name, (good, bad) in OF_FORMATS.items()
}


@pytest.mark.parametrize("name", FEATURES)
def test_what_fulfils_the_schema_may_be_answered_and_nothing_else(name: str) -> None:
    schema, good, bad = FEATURES[name]
    assert not compiler_of(bytes_tokenizer()).compile(format_of(schema))[1].left_out
    assert [(text, accepts(schema, text)) for text in good] == [(text, True) for text in good]
    assert [(text, accepts(schema, text)) for text in bad] == [(text, False) for text in bad]
    assert not any(fault(schema, text) for text in good)
    assert all(fault(schema, text) for text in bad)


@pytest.mark.parametrize("text", ['"a\\"b"', '"a\\\\b"'])
def test_a_pattern_may_exclude_what_json_escapes(text: str) -> None:
    assert not accepts({"type": "string", "pattern": '^[^"\\\\]*$'}, text)


@pytest.mark.parametrize(
    "draft_4", [{"minimum": 2, "exclusiveMinimum": True}, {"maximum": 4, "exclusiveMaximum": True}], ids=str
)
def test_exclusive_bounds_of_draft_4_are_kept(draft_4: Schema) -> None:
    schema = {"type": "integer", **draft_4}
    assert accepts(schema, "3")
    assert not any(accepts(schema, str(value)) for value in (draft_4.get("minimum"), draft_4.get("maximum")))


VALUES = [f"{number}" for number in range(6)]


def test_a_pattern_may_name_classes_of_unicode() -> None:
    schema: Schema = {"type": "string", "pattern": r"^\p{L}+$"}
    assert accepts(schema, '"a\u00e9\u65e5"')
    assert not accepts(schema, '"a1"')


UNSUPPORTED: dict[str, Schema] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "contains of at most two": {"type": "array", "contains": {"type": "string"}, "maxContains": 2},
    "contains of any value": {"contains": {"type": "string"}},
    "contains of alternatives": {"type": "array", "contains": {"type": "string"}, "anyOf": [{"minItems": 2}]},
    "contains": {"type": "array", "contains": {"type": "string"}, "minContains": 9},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "uniqueItems of six": {**SET, "items": {"enum": VALUES}},
    "uniqueItems of no value": {**SET, "items": {"type": "integer", "enum": ["a"]}},
    "uniqueItems of mixed values": {**SET, "items": {"enum": [1, True]}},
    "propertyNames": {"type": "object", "propertyNames": {"format": "uuid"}},
    "propertyNames of no name": {"type": "object", "propertyNames": False},
    "propertyNames of integers": {"type": "object", "propertyNames": {"type": "integer"}},
    "propertyNames of patterns": {"patternProperties": {"^x": {}}, "propertyNames": {"enum": ["xa"]}},
    "propertyNames of 129": {**NAMED, "propertyNames": {"enum": [f"{number}" for number in range(129)]}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "password": {"type": "string", "format": "password"},
    "oneOf": {"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 5}]},
    "look-ahead": {"type": "string", "pattern": "^(?:a(?=bc))*"},
    "float range": {"type": "number", "minimum": 1e300},
    "nested parentheses": {"type": "number", "exclusiveMinimum": 5e-324},
    "references to groups": {"type": "string", "pattern": r"(a)\1"},
    "multipleOf": {"type": "number", "multipleOf": 1e20},
    "min/maxProperties": {**OBJECT, "minProperties": 2},
    "are not disjoint": {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "a$": {}}},
}


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_what_cannot_be_enforced_is_left_out_by_name_unless_the_schema_is_strict(keyword: str) -> None:
    compiler, name = compiler_of(words_tokenizer()), keyword.split(" of ")[0]
    schema = {"type": "array", "items": UNSUPPORTED[keyword]}
    assert name in compiler.compile(format_of(schema))[1].left_out
    assert not compiler.compile(format_of({"type": "object"}))[1].left_out
    with pytest.raises(RequestError, match=name):
        guide_of({"x-guidance": {"lenient": False}, **schema}, words_tokenizer())


def test_what_is_left_out_takes_nothing_else_with_it() -> None:
    schema: Schema = {
        "type": "object",
        "patternProperties": {"^x": {"type": "integer", "multipleOf": 1e20}},
        "additionalProperties": {"not": {"const": 0}},
        "minProperties": 1,
    }
    assert accepts(schema, '{"xa": 1}')
    assert not any(accepts(schema, text) for text in ("{}", '{"xa": ""}'))
    closed: Schema = {"type": "object", "properties": {"a": {"not": {"const": 0}}, "b": {}}, "minProperties": 1}
    assert accepts(closed, '{"a": 1}')
    assert not any(accepts(closed, text) for text in ("{}", '{"x": 1}'))
