"""An object that lists properties has no others, unless it is combined with others or says so itself."""

from copy import deepcopy

import pytest

from runner.grammar.closed_objects import close_objects
from tests.unit.grammar.tags import Node
from tests.unit.grammar.walks import accepts

A: Node = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: Node = {"type": "object", "properties": {"b": {"type": "integer"}}}
AB: Node = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
DEFS: Node = {"$defs": {"A": A, "B": B}}
TO_A: Node = {"$ref": "#/$defs/A"}
TO_B: Node = {"$ref": "#/$defs/B"}
CLOSED: dict[str, Node] = {
    "an object": A,
    "without a type": {"properties": A["properties"]},
    "with a note": {**A, "title": "T", "required": ["a"], "minProperties": 1},
    "a reference": {**DEFS, **TO_A},
    "an alternative": {**DEFS, "anyOf": [TO_A, {"type": "null"}], "default": None},
    "one of several": {**DEFS, "oneOf": [TO_A, {"type": "null"}]},
    "alone in allOf": {**DEFS, "allOf": [TO_A], "title": "T"},
    "beside anyOf of required": {**AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "beside oneOf of required": {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"], "title": "T"}]},
    "beside allOf of its own": {**AB, "allOf": [{"required": ["a"]}, A, {"anyOf": [{"minProperties": 1}, {}]}]},
    "beside what must not be": {**A, "anyOf": [{"not": {"required": ["x"]}}, {"required": ["a"]}]},
    "beside a reference to its own": {**DEFS, **AB, **TO_A},
    "beside closed alternatives": {**AB, "anyOf": [{**A, "additionalProperties": False}]},
    "with if of its own": {**AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": A},
    "with dependentRequired of its own": {**AB, "dependentRequired": {"b": ["a"]}},
    "with dependencies of its own": {**AB, "dependencies": {"b": ["a"], "a": {"required": ["b"]}}},
    "without unevaluatedProperties": {**A, "unevaluatedProperties": False},
    "where only a reference leads": {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": A}}},
    "where a reference leads by a number": {"$ref": "#/x/0", "x": [A]},
    "a structural tag": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": A}},
}
INSIDE: dict[str, tuple[Node, str]] = {
    "items": ({"type": "array", "items": A}, "[%s]"),
    "prefixItems": ({"type": "array", "prefixItems": [A]}, "[%s]"),
    "a property": ({"type": "object", "properties": {"x": A}}, '{"x": %s}'),
    "additional properties": ({"type": "object", "additionalProperties": A}, '{"x": %s}'),
    "properties of a pattern": ({"type": "object", "patternProperties": {"x": A}}, '{"x": %s}'),
}
OPEN: dict[str, Node] = {
    "additionalProperties": {**A, "additionalProperties": True},
    "patternProperties": {**A, "patternProperties": {"^x": {}}},
    "unevaluatedProperties": {**A, "unevaluatedProperties": True},
    "options for llguidance": {**A, "x-guidance": {}},
    "no properties": {"type": "object"},
    "a property that is not listed": {**A, "required": ["x"]},
    "more properties than are listed": {**A, "minProperties": 2},
    "parts of allOf": {"allOf": [A, B]},
    "references in allOf": {**DEFS, "allOf": [TO_A, TO_B]},
    "beside allOf": {"$defs": {"B": B}, **A, "allOf": [TO_B]},
    "beside anyOf": {**A, "anyOf": [B, {"type": "object"}]},
    "beside a reference": {"$defs": {"A": A}, **B, **TO_A},
    "with an own word": {"$defs": {"A": A}, "allOf": [TO_A], "minProperties": 1},
    "through several references": {
        "$defs": {"A": A, "X": {"anyOf": [TO_A]}},
        "allOf": [{"$ref": "#/$defs/X"}, {"type": "object"}],
    },
    "allOf beside anyOf": {"anyOf": [A], "allOf": [B]},
    "beside an alternative that needs more": {**A, "anyOf": [{"required": ["a"]}, {"required": ["x"]}]},
    "beside an alternative that is open": {**A, "anyOf": [{"required": ["a"], "additionalProperties": True}]},
    "beside a reference that is not followed": {**A, "$dynamicRef": "#x"},
    "dependentRequired of more": {**A, "dependentRequired": {"a": ["x"]}},
    "dependencies of more": {**A, "dependencies": {"a": {"required": ["x"]}}},
    "if": {**A, "if": {"required": ["a"]}, "then": {"required": ["x"]}},
}


@pytest.mark.parametrize("name", CLOSED)
def test_an_object_that_stands_alone_is_closed(name: str) -> None:
    assert accepts(CLOSED[name], '{"a": 1}')
    assert not accepts(CLOSED[name], '{"a": 1, "x": 1}')


@pytest.mark.parametrize("name", OPEN)
def test_an_object_that_is_combined_or_says_so_stays_open(name: str) -> None:
    assert accepts(OPEN[name], '{"a": 1, "x": 1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"properties": {}}, "default": {"x": {"properties": {}}}, "enum": [{"properties": {}}]},
        {"examples": [{"properties": {}}], "x-more": {"x": {"properties": {}}}},
        {"allOf": [{"$ref": "#"}, {"properties": {}}]},
        {**A, "anyOf": [{"minProperties": 2}, {"required": ["a"]}]},
        {"prefixItems": [True], "items": False, "allOf": True, "$ref": 1, "properties": [], "required": 1},
    ],
    ids=["values", "other keywords", "a circle", "more properties", "nonsense"],
)
def test_only_object_schemas_are_closed(schema: Node) -> None:
    changed = deepcopy(schema)
    close_objects(changed)
    assert changed == schema


@pytest.mark.parametrize("key", ["anyOf", "oneOf"])
def test_alternatives_of_a_closed_object_stay_open(key: str) -> None:
    kinds: list[Node] = [{"properties": {"a": {"const": each}}, "required": ["a"]} for each in (1, 2)]
    schema = {**AB, key: kinds}
    assert all(accepts(schema, text) for text in ('{"a": 1}', '{"a": 2, "b": 3}'))
    assert not any(accepts(schema, text) for text in ('{"a": 3}', '{"b": 3}', '{"a": 1, "x": 1}'))


Y_OF_X = '{"x": {"y": %s}}'
LIST_A: Node = {"type": "array", "items": A}
LIST_B: Node = {"items": B}
PAIRS: dict[str, tuple[Node, str]] = {
    "a property": ({"allOf": [{"properties": {"x": A}}, {"properties": {"x": B}}]}, '{"x": %s}'),
    "its own": ({"properties": {"x": A}, "allOf": [{"properties": {"x": B}}]}, '{"x": %s}'),
    "references": ({**DEFS, "allOf": [{"properties": {"x": TO_A}}, {"properties": {"x": TO_B}}]}, '{"x": %s}'),
    "an alternative": ({"properties": {"x": A}, "anyOf": [{"properties": {"x": B}}]}, '{"x": %s}'),
    "one deeper": ({"allOf": [{"properties": {"x": {"properties": {"y": each}}}} for each in (A, B)]}, Y_OF_X),
    "more properties": ({"allOf": [{"properties": {"x": A}}, {"additionalProperties": B}]}, '{"x": %s}'),
    "items": ({"allOf": [LIST_A, LIST_B]}, "[%s]"),
    "an item": ({"allOf": [LIST_A, {"prefixItems": [B]}]}, "[%s]"),
    "items of a property": ({"allOf": [{"properties": {"x": LIST_A}}, {"properties": {"x": LIST_B}}]}, '{"x": [%s]}'),
}


@pytest.mark.parametrize("name", PAIRS)
def test_objects_in_parts_that_are_combined_do_not_rule_each_other_out(name: str) -> None:
    schema, around = PAIRS[name]
    assert accepts(schema, around % '{"a": 1, "b": 2}')
    assert not accepts(schema, around % '{"a": 1, "b": "x"}')


def test_what_an_array_contains_does_not_rule_out_its_items() -> None:
    one: Node = {"properties": {"a": {"const": 1}}, "required": ["a"]}
    schema: Node = {"type": "array", "items": {**AB, "required": ["a", "b"]}, "contains": one}
    assert accepts(schema, '[{"a": 1, "b": 2}]')
    assert not accepts(schema, '[{"a": 2, "b": 2}]')


APART: dict[str, tuple[Node, str]] = {
    **INSIDE,
    "in two alternatives": ({"anyOf": [{"properties": {"x": each}} for each in (A, B)], **TO_A, **DEFS}, '{"x": %s}'),
    "under two names": ({"allOf": [{"properties": {"x": A}}, {"properties": {"y": B}}]}, '{"x": %s}'),
    "beside its own": ({"properties": {"x": AB}, "anyOf": [{"properties": {"x": A}}]}, '{"x": %s}'),
    "beside itself": ({**DEFS, "allOf": [{"properties": {"x": TO_A}}, {"properties": {"x": TO_A}}]}, '{"x": %s}'),
    "in two that share a part": (
        {**DEFS, "anyOf": [{"allOf": [TO_B, {"properties": {"x": each}}]} for each in (A, B)]},
        '{"x": %s}',
    ),
}


@pytest.mark.parametrize("name", APART)
def test_an_object_inside_of_a_value_is_closed_unless_another_part_describes_it(name: str) -> None:
    schema, around = APART[name]
    assert accepts(schema, around % '{"a": 1}')
    assert not accepts(schema, around % '{"a": 1, "z": 1}')


def test_a_schema_that_closing_makes_impossible_stays_open() -> None:
    hidden = {"allOf": [{"$ref": "#/$defs/X/anyOf/0"}, {**B, "required": ["b"]}], "$defs": {"X": {"anyOf": [A]}}}
    assert accepts(hidden, '{"b": 1}')
    assert accepts(hidden, '{"a": 1, "b": 1}') or accepts(hidden, '{"b": 1, "a": 1}')
